"""23 Mixture of experts: each rank has some experts, and tokens travel to them.

A small network, the router, chooses one of E experts for each token. All parameters of the experts
together are many, the work per token is that of one. Experts are divided over the ranks, and so are
the tokens: an all-to-all brings each token to its expert, a second one brings the result back, and
backward sends the gradients by the same two ways (Lepikhin et al., "GShard", 2020; one expert per
token: Fedus et al., "Switch Transformer", 2021). The output is scaled by the probability that the
router has given, so that the router learns, too.

Here each rank sends every other rank a box with room for all of its tokens, so that none is dropped
and the bytes do not depend on the router. Real systems bound the room (capacity) and drop tokens,
or send the numbers of tokens first.
"""

import numpy as np

from nets import BATCH, CLASSES, RATE, STEPS, batch, cross_entropy, join, part, square
from ranks import Array, Rank, main

EXPERTS, FEATURES = 12, 64


def to_experts(rank: Rank, tokens: Array, expert: Array) -> Array:
    """(N / P, D), (N / P,) -> (P, N / P, D): tokens of all ranks for the experts of this one."""
    # exercise: the rank that has the expert of each token
    owner = expert // (EXPERTS // rank.size)  # (N / P,)
    boxes = [np.where((owner == to)[:, None], tokens, 0) for to in range(rank.size)]
    return np.stack(rank.all_to_all(boxes))


def from_experts(rank: Rank, results: Array, expert: Array) -> Array:
    """(P, N / P, D), (N / P,) -> (N / P, D): the results of this rank's tokens."""
    owner = expert // (EXPERTS // rank.size)
    return np.stack(rank.all_to_all(list(results)))[owner, np.arange(len(expert))]


def train(rank: Rank) -> Array:
    """Train router, experts (a matrix each) and scores with tokens and experts divided."""
    router, out = square(1, FEATURES, EXPERTS), square(2, FEATURES, CLASSES)  # (D, E), (D, 4)
    mine = part(np.arange(EXPERTS), rank.rank, rank.size)
    experts = np.stack([square(10 + e, FEATURES, FEATURES) for e in mine])  # (E / P, D, D)
    for step in range(STEPS):
        images, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        x = images.reshape(len(images), -1)  # (N / P, D): a token is an image
        p = np.exp(x @ router)
        p /= p.sum(axis=1, keepdims=True)  # (N / P, E)
        expert = p.argmax(axis=1)  # (N / P,)
        weight = p.max(axis=1, keepdims=True)  # (N / P, 1)

        theirs = np.stack(rank.allgather(expert))  # (P, N / P): which expert each box is for
        boxes = to_experts(rank, x, expert)  # (P, N / P, D)
        here = (theirs[..., None] == mine).astype(float)  # (P, N / P, E / P)
        y = from_experts(rank, np.einsum("pnd,pne,edf->pnf", boxes, here, experts), expert)
        _, d = cross_entropy((weight * y) @ out, labels)  # (N / P, 4)

        dscaled = d @ out.T  # (N / P, D)
        dboxes = to_experts(rank, weight * dscaled, expert)  # (P, N / P, D)
        # tokens end here (they are data), so that nothing has to be sent back
        experts -= RATE / BATCH * np.einsum("pnd,pne,pnf->edf", boxes, here, dboxes)
        dweight = (dscaled * y).sum(axis=1, keepdims=True)  # (N / P, 1)
        dlogits = dweight * weight * (np.eye(EXPERTS)[expert] - p)  # (N / P, E), of softmax
        local = [x.T @ dlogits, (weight * y).T @ d]
        total = RATE / BATCH * rank.allreduce(join(local))
        router -= total[: router.size].reshape(router.shape)
        out -= total[router.size :].reshape(out.shape)
    return join([router, out, *rank.allgather(experts)])


def bytes_sent(size: int) -> int:
    """Return the bytes of three all-to-all, the numbers of experts and a sum, and the experts."""
    tokens = BATCH // size
    common = 2 * -(-FEATURES * (EXPERTS + CLASSES) // size)
    step = 3 * tokens * FEATURES + tokens + common
    return 8 * (size - 1) * (STEPS * step + EXPERTS // size * FEATURES**2)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (P - 1) (steps x ((3 D + 1) N / P + 2 ceil(D (E + 4) / P)) + E D^2 / P)",
        "pydtnn/model/partition/exchanged_experts.py: ExchangedExperts",
    )

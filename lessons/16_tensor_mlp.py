"""16 Tensor parallelism, the two layers of an MLP: columns, then rows.

The first layer's matrix is cut into columns: each rank computes some of the hidden features from
the whole input, and the activation function acts on each alone. The second layer's matrix is cut
into rows: each rank multiplies the features that it has, and one sum over ranks completes the
output. No message is sent between the two layers. Backward mirrors forward: the gradient of the
pair's input is a sum over ranks (Shoeybi et al., "Megatron-LM", 2019).

The layer before the pair is on all ranks, which compute the same; its gradient must not be summed.
"""

import numpy as np

from nets import BATCH, RATE, STEPS, batch, cross_entropy, join, linear_backward, parameters, part
from ranks import Array, Rank, main

SIZES = [64, 24, 48, 4]


def train(rank: Rank) -> Array:
    """Train with the hidden features of the last two layers divided over the ranks."""
    w0, b0, w1, b1, w2, b2 = parameters(SIZES)
    w1, b1 = (part(a, rank.rank, rank.size, axis=-1) for a in (w1, b1))  # (24, 48 / P), (48 / P,)
    w2 = part(w2, rank.rank, rank.size)  # (48 / P, 4)
    for step in range(STEPS):
        x, labels = batch(step)
        x = x.reshape(BATCH, -1)  # (N, 64)
        h0 = np.maximum(x @ w0 + b0, 0)  # (N, 24), the same on every rank
        h1 = np.maximum(h0 @ w1 + b1, 0)  # (N, 48 / P)
        scores = rank.allreduce(h1 @ w2) + b2  # (N, 4); the bias once
        _, d2 = cross_entropy(scores, labels)

        dh1, dw2, db2 = linear_backward(d2, h1, w2)
        dh0, dw1, db1 = linear_backward(dh1 * (h1 > 0), h0, w1)  # dh0: what these columns add
        # exercise: the gradient of the input of the divided pair
        dh0 = rank.allreduce(dh0) * (h0 > 0)  # (N, 24)
        _, dw0, db0 = linear_backward(dh0, x, w0)
        for p, g in zip((w0, b0, w1, b1, w2, b2), (dw0, db0, dw1, db1, dw2, db2), strict=True):
            p -= RATE / BATCH * g
    columns = [np.concatenate(rank.allgather(a), axis=-1) for a in (w1, b1)]  # to compare
    return join([w0, b0, *columns, np.concatenate(rank.allgather(w2)), b2])


def bytes_sent(size: int) -> int:
    """Return the bytes of two sums in each step, and of the parts that are compared."""
    sums = sum(2 * -(-BATCH * features // size) for features in (4, 24))
    parts = (24 + 1 + 4) * 48 // size
    return 8 * (size - 1) * (STEPS * sums + parts)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (P - 1) (steps x 2 (ceil(4 N / P) + ceil(24 N / P)) + parameters / P)",
        "pydtnn/model/partition/rules.py: alternate",
    )

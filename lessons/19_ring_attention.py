"""19 Ring attention: tokens are divided, and keys and values travel around.

Each rank has T / P tokens of every sequence. Its queries need the keys and values of all tokens
before them: these go around a ring, a part per round, while each rank attends to the part that it
has at the moment. Softmax over parts is computed online: for each query keep the largest score so
far, the sum of exponentials and the weighted sum of values, and scale them when a larger score
appears (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023; the online
softmax is that of Milakov and Gimelshein, 2018). No array of T x T exists anywhere.

Backward sends keys and values around again, with the gradients that each rank adds to theirs. With
causal masks later ranks have more to do; zigzag orders of tokens mend that and are left out here.
"""

import numpy as np

from nets import (
    RATE,
    SEQUENCES,
    STEPS,
    TOKENS,
    WIDTH,
    WORDS,
    embedding,
    heads,
    join,
    joined,
    outer,
    part,
    sequences,
    square,
    word_loss,
)
from ranks import Array, Rank, main

SCALE = RATE / (SEQUENCES * TOKENS)


def scores_of(rank: Rank, q: Array, k: Array, source: int) -> Array:
    """Return the masked scores (N, h, t, t) of these queries and the keys of a rank."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    first = q.shape[2] * np.array([rank.rank, source])
    allowed = first[0] + np.arange(q.shape[2])[:, None] >= first[1] + np.arange(q.shape[2])
    return np.where(allowed, scores, -np.inf)


def forward(rank: Rank, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return the output (N, h, t, d) and the logarithm of the sum of exponentials (N, h, t, 1)."""
    largest = np.full((*q.shape[:3], 1), -1e30)
    total, out = np.zeros_like(largest), np.zeros_like(q)
    for i in range(rank.size):
        scores = scores_of(rank, q, k, (rank.rank - i) % rank.size)
        new = np.maximum(largest, scores.max(axis=-1, keepdims=True))
        p, shrink = np.exp(scores - new), np.exp(largest - new)
        # exercise: the sum of exponentials so far, and the new ones
        total = total * shrink + p.sum(axis=-1, keepdims=True)
        out, largest = out * shrink + p @ v, new
        if i < rank.size - 1:
            k, v = around(rank, np.stack([k, v]))
    return out / total, largest + np.log(total)


def backward(
    rank: Rank, dy: Array, q: Array, k: Array, v: Array, out: Array, log: Array
) -> list[Array]:
    """Return the gradients of q, k and v, (N, h, t, d) each."""
    dots = (dy * out).sum(axis=-1, keepdims=True)  # (N, h, t, 1), the sum over keys of p dp
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(rank.size):
        p = np.exp(scores_of(rank, q, k, (rank.rank - i) % rank.size) - log)  # (N, h, t, t)
        ds = p * (dy @ v.swapaxes(2, 3) - dots) / np.sqrt(q.shape[-1])
        dq += ds @ k
        dk, dv = dk + ds.swapaxes(2, 3) @ q, dv + p.swapaxes(2, 3) @ dy
        k, v, dk, dv = around(rank, np.stack([k, v, dk, dv]))  # the last round returns them home
    return [dq, dk, dv]


def around(rank: Rank, arrays: Array) -> Array:
    """Send arrays to the next rank, and return those of the one before."""
    if rank.size == 1:
        return arrays
    rank.send(arrays, (rank.rank + 1) % rank.size)
    return rank.receive((rank.rank - 1) % rank.size)


def train(rank: Rank) -> Array:
    """Train embedding, attention with a residual, and scores with the tokens divided."""
    table, matrices = embedding(), [square(seed) for seed in (2, 3, 4)]
    places = part(np.arange(WORDS, WORDS + TOKENS), rank.rank, rank.size)
    for step in range(STEPS):
        words, targets = (part(a, rank.rank, rank.size, axis=1) for a in sequences(step))
        x = table[words] + table[places]  # (N, t, D) with t = T / P
        q, k, v = (heads(x @ w) for w in matrices)
        y, log = forward(rank, q, k, v)
        _, dout, dwords = word_loss(x + joined(y), table[:WORDS], targets)

        gradients = [joined(d) for d in backward(rank, heads(dout), q, k, v, y, log)]
        dx = dout + sum(d @ w.T for d, w in zip(gradients, matrices, strict=True))
        dtable = np.zeros_like(table)
        dtable[:WORDS] += dwords
        np.add.at(dtable, words, dx)
        dtable[places] += dx.sum(axis=0)
        local = [dtable, *(outer(x, d) for d in gradients)]
        total = SCALE * rank.allreduce(join(local))  # all parameters are on all ranks
        table -= total[: table.size].reshape(table.shape)
        rest = total[table.size :].reshape(3, WIDTH, WIDTH)
        matrices = [w - g for w, g in zip(matrices, rest, strict=True)]
    return join([table, *matrices])


def bytes_sent(size: int) -> int:
    """Return the bytes: 2 arrays P - 1 times in forward, 4 arrays P times in backward, a sum."""
    tokens = SEQUENCES * TOKENS * WIDTH // size
    rounds = 2 * (size - 1) + 4 * size * (size > 1)
    n = (WORDS + TOKENS) * WIDTH + 3 * WIDTH**2
    return STEPS * 8 * (rounds * tokens + 2 * (size - 1) * -(-n // size))


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 8 x ((6 P - 2) N T D / P + 2 (P - 1) ceil(n / P))",
        "pydtnn/model/partition/ring_attention.py: RingAttention",
    )

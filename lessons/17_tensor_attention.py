"""17 Tensor parallelism, attention: heads are independent of each other.

Each head multiplies its own queries, keys and values. Rank r computes some heads: the matrices that
make q, k and v are cut into columns, as in the first layer of lesson 16, and the one that follows
the heads into rows, as in its second: again one sum in forward and one in backward (Shoeybi et al.,
2019). Scores of T x T for each head, the largest arrays of a transformer, are divided, too.
"""

import numpy as np

from nets import (
    HEADS,
    RATE,
    SEQUENCES,
    STEPS,
    TOKENS,
    WIDTH,
    WORDS,
    attention,
    attention_backward,
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


def train(rank: Rank) -> Array:
    """Train embedding, attention with a residual, and scores with the heads divided."""
    table = embedding()  # (V + T, D)
    matrices = [part(square(seed), rank.rank, rank.size, axis=1) for seed in (2, 3, 4)]
    wo = part(square(5), rank.rank, rank.size)  # (D / P, D)
    for step in range(STEPS):
        words, targets = sequences(step)  # (N, T) each
        x = table[words] + table[WORDS:]  # (N, T, D)
        q, k, v = (heads(x @ w) for w in matrices)  # (N, h / P, T, d) each
        y, p = attention(q, k, v)
        local = joined(y)  # (N, T, D / P)
        out = x + rank.allreduce(local @ wo)  # (N, T, D)
        _, dout, dtable = word_loss(out, table[:WORDS], targets)

        dlocal = dout @ wo.T  # (N, T, D / P)
        gradients = [joined(d) for d in attention_backward(heads(dlocal), q, k, v, p)]
        dx = sum(d @ w.T for d, w in zip(gradients, matrices, strict=True))  # of these heads
        # exercise: the gradient of x, with that of the residual
        dx = dout + rank.allreduce(dx)  # the residual once
        wo -= SCALE * outer(local, dout)
        matrices = [w - SCALE * outer(x, d) for w, d in zip(matrices, gradients, strict=True)]
        table[:WORDS] -= SCALE * dtable
        np.subtract.at(table, words, SCALE * dx)
        table[WORDS:] -= SCALE * dx.sum(axis=0)
    whole = [np.concatenate(rank.allgather(w), axis=1) for w in matrices]  # to compare
    return join([table, *whole, np.concatenate(rank.allgather(wo))])


def bytes_sent(size: int) -> int:
    """Return the bytes of two sums in each step, and of the parts that are compared."""
    assert HEADS % size == 0
    activations = 2 * 2 * -(-SEQUENCES * TOKENS * WIDTH // size)
    return 8 * (size - 1) * (STEPS * activations + 4 * WIDTH**2 // size)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (P - 1) (steps x 4 ceil(N T D / P) + 4 D^2 / P)",
        "pydtnn/model/partition/rules.py: filters",
    )

"""18 Sequence parallelism: between the divided layers, tokens are divided.

Tensor parallelism leaves layer norms and residuals whole on every rank: the same work and memory P
times. They treat each token alone, so that the sum after the rows of lesson 16 can stop half-way:
reduce-scatter gives each rank the complete sums of some tokens, which it normalizes, and an
allgather brings all tokens to the next divided layer. The bytes are those of the sum; memory
between the layers falls by P (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022). Gradients of what is on all ranks (the norm's scale) are sums now.
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
    join,
    outer,
    part,
    sequences,
    square,
    word_loss,
)
from ranks import Array, Rank, main

SCALE, HIDDEN = RATE / (SEQUENCES * TOKENS), 48


def norm(x: Array) -> tuple[Array, Array]:
    """(N, T, D) -> each token with mean 0 and deviation 1, and the inverse deviations (N, T, 1)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return centred * inverse, inverse


def norm_backward(dy: Array, y: Array, inverse: Array) -> Array:
    """Return the gradient of x, (N, T, D)."""
    means = dy.mean(axis=-1, keepdims=True) + y * (dy * y).mean(axis=-1, keepdims=True)
    return inverse * (dy - means)


def train(rank: Rank) -> Array:
    """Train embedding, norm, MLP with a residual, and scores; tokens divided but in the MLP."""
    table, gain = embedding(), np.ones(WIDTH)
    w1 = part(square(2, WIDTH, HIDDEN), rank.rank, rank.size, axis=1)  # (D, H / P)
    w2 = part(square(3, HIDDEN, WIDTH), rank.rank, rank.size)  # (H / P, D)
    for step in range(STEPS):
        words, targets = (part(a, rank.rank, rank.size, axis=1) for a in sequences(step))
        places = part(np.arange(WORDS, WORDS + TOKENS), rank.rank, rank.size)
        x = table[words] + table[places]  # (N, T / P, D): tokens of this rank
        normal, inverse = norm(x)
        every = np.concatenate(rank.allgather(normal * gain), axis=1)  # (N, T, D)
        h = np.maximum(every @ w1, 0)  # (N, T, H / P)
        out = x + rank.reduce_scatter(np.split(h @ w2, rank.size, axis=1))  # (N, T / P, D)
        _, dout, dwords = word_loss(out, table[:WORDS], targets)

        dsum = np.concatenate(rank.allgather(dout), axis=1)  # (N, T, D)
        dh = (dsum @ w2.T) * (h > 0)
        # exercise: the gradient of the tokens of this rank
        dscaled = rank.reduce_scatter(np.split(dh @ w1.T, rank.size, axis=1))  # (N, T / P, D)
        dx = dout + norm_backward(dscaled * gain, normal, inverse)
        w2 -= SCALE * outer(h, dsum)
        w1 -= SCALE * outer(every, dh)
        dtable = np.zeros_like(table)  # of these tokens: a sum over ranks is needed
        dtable[:WORDS] += dwords
        np.add.at(dtable, words, dx)
        dtable[places] += dx.sum(axis=0)
        dgain = (dscaled * normal).sum(axis=(0, 1))
        total = rank.allreduce(join([dtable, dgain]))
        table -= SCALE * total[: table.size].reshape(table.shape)
        gain -= SCALE * total[table.size :]
    whole = np.concatenate(rank.allgather(w1), axis=1), np.concatenate(rank.allgather(w2))
    return join([table, gain, *whole])


def bytes_sent(size: int) -> int:
    """Return the bytes of two gathers and two scatters in each step, and those of a sum."""
    activations = 4 * SEQUENCES * TOKENS * WIDTH // size
    common = 2 * -(-(WORDS + TOKENS + 1) * WIDTH // size)
    return 8 * (size - 1) * (STEPS * (activations + common) + 2 * WIDTH * HIDDEN // size)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (P - 1) (steps x (4 N T D / P + 2 ceil((V + T + 1) D / P)) + 2 D H / P)",
        "pydtnn/model/partition/rules.py: follow",
    )

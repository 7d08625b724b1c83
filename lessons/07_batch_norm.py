"""07 Batch normalization over ranks: the mean of the whole batch, not of a part.

Batch norm subtracts the mean of a channel over the batch and divides by its deviation (Ioffe and
Szegedy, 2015). With the samples divided, each rank sees other means: training then depends on the
number of ranks. Two small sums mend it: forward adds the sums of x, and then those of (x - mean)^2;
backward adds the two sums over samples which its formula contains.

The squares are summed around the mean of all ranks in a second sum. The difference E x^2 - (E x)^2
would need one sum, but cancels catastrophically if the mean is large.
"""

import numpy as np

from nets import BATCH, HIDDEN, RATE, STEPS, batch, cross_entropy, join, parameters, part, split
from ranks import Array, Rank, main

EPSILON = 1e-5
SIZES = [64, HIDDEN, 4]


def train(rank: Rank) -> Array:
    """Train linear, batch norm, ReLU, linear with the samples divided over the ranks."""
    w1, _, w2, b2 = parameters(SIZES)  # (64, C), (C, 4), (4,)
    scale, shift = np.ones(HIDDEN), np.zeros(HIDDEN)  # (C,) of batch norm
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        x0 = x.reshape(len(x), -1)  # (N / P, 64)
        z = x0 @ w1  # (N / P, C)
        mean = rank.allreduce(z.sum(axis=0)) / BATCH  # (C,), of all N samples
        centred = z - mean
        # exercise: the variance of each channel over all samples
        variance = rank.allreduce((centred**2).sum(axis=0)) / BATCH  # (C,)
        inverse = 1 / np.sqrt(variance + EPSILON)
        normal = centred * inverse  # (N / P, C)
        x1 = np.maximum(normal * scale + shift, 0)
        _, d2 = cross_entropy(x1 @ w2 + b2, labels)  # (N / P, 4)

        d1 = (d2 @ w2.T) * (x1 > 0)  # (N / P, C)
        # gradients of scale and shift, which backward needs over all samples
        sums = rank.allreduce(np.stack([(d1 * normal).sum(axis=0), d1.sum(axis=0)]))  # (2, C)
        dz = scale * inverse * (d1 - sums[1] / BATCH - normal * sums[0] / BATCH)  # (N / P, C)
        local = [x0.T @ dz, x1.T @ d2, d2.sum(axis=0)]
        total = rank.allreduce(join(local))
        for p, g in zip((w1, w2, b2), split(total, local), strict=True):
            p -= RATE / BATCH * g
        scale -= RATE / BATCH * sums[0]
        shift -= RATE / BATCH * sums[1]
    return join([w1, scale, shift, w2, b2])


def bytes_sent(size: int) -> int:
    """Return the bytes of four sums: the means, the variances, two sums of backward, gradients."""
    n = 64 * HIDDEN + HIDDEN * 4 + 4
    chunks = sum(-(-elements // size) for elements in (HIDDEN, HIDDEN, 2 * HIDDEN, n))
    return STEPS * 2 * (size - 1) * chunks * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 2 (P - 1) (2 ceil(C / P) + ceil(2 C / P) + ceil(n / P)) x 8",
        "pydtnn/layers/norm.py: BatchNorm",
    )

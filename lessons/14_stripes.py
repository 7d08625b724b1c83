"""14 Stripes: each rank has some rows of every image, and borrows one row of each neighbour.

A 3x3 convolution needs, for each output row, the input rows above and below. With images cut into
stripes, only the rows at the cuts are missing (the halo): neighbours exchange them before each
convolution, and the gradients' rows in backward. Memory and work fall by P even for a batch of one
image; bytes grow with the width of the image, not with its height (Dryden et al., "Improving
strong-scaling of CNN training by exploiting finer-grained parallelism", 2019).

Layers without neighbours (ReLU) need nothing; the mean over positions is a sum over ranks.
"""

import numpy as np

from nets import (
    BATCH,
    CHANNELS,
    RATE,
    SIDE,
    STEPS,
    batch,
    conv,
    conv_backward,
    cross_entropy,
    filters,
    join,
    linear,
    linear_backward,
    part,
    split,
    turned,
)
from ranks import Array, Rank, main


def with_halo(rank: Rank, x: Array) -> Array:
    """(N, H / P, W, C) -> (N, H / P + 2, W + 2, C): rows of the neighbours, zeros at the edges."""
    up, down = rank.rank - 1, rank.rank + 1
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    if up >= 0:
        rank.send(x[:, 0], up)
    if down < rank.size:
        rank.send(x[:, -1], down)
        # exercise: the row below the last one of this rank
        padded[:, -1, 1:-1] = rank.receive(down)
    if up >= 0:
        padded[:, 0, 1:-1] = rank.receive(up)
    return padded


def train(rank: Rank) -> Array:
    """Train conv, ReLU, conv, ReLU, mean, linear with the rows divided over the ranks."""
    params = filters()
    for step in range(STEPS):
        k1, k2, w, b = params  # (3, 3, 1, C), (3, 3, C, C), (C, 4), (4,)
        images, labels = batch(step)
        x0 = with_halo(rank, part(images, rank.rank, rank.size, axis=1)[..., None])
        y1 = np.maximum(conv(x0, k1), 0)  # (N, H / P, W, C)
        x1 = with_halo(rank, y1)
        y2 = np.maximum(conv(x1, k2), 0)
        mean = rank.allreduce(y2.sum(axis=(1, 2))) / SIDE**2  # (N, C), of all rows
        _, d = cross_entropy(linear(mean, w, b), labels)  # (N, 4), the same on every rank

        dmean, dw, db = linear_backward(d, mean, w)  # complete: not to be summed
        d2 = np.broadcast_to(dmean[:, None, None] / SIDE**2, y2.shape) * (y2 > 0)
        d1 = conv(with_halo(rank, d2), turned(k2)) * (y1 > 0)  # (N, H / P, W, C)
        local = [conv_backward(d1, x0, k1), conv_backward(d2, x1, k2)]  # of these rows
        dk1, dk2 = split(rank.allreduce(join(local)), local)
        grads = [dk1, dk2, dw, db]
        params = [p - RATE / BATCH * g for p, g in zip(params, grads, strict=True)]
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of rank 0: a row of 1, C and C channels, the means, the filters."""
    rows = BATCH * SIDE * (1 + CHANNELS + CHANNELS) * (size > 1)
    sums = [BATCH * CHANNELS, 9 * CHANNELS + 9 * CHANNELS**2]
    return STEPS * 8 * (rows + sum(2 * (size - 1) * -(-n // size) for n in sums))


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 8 x (N W (1 + 2 C) + 2 (P - 1) (ceil(N C / P) + ceil(9 (C + C^2) / P)))",
        "pydtnn/model/partition/striped_conv.py: StripedConv2d",
    )

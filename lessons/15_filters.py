"""15 Filters: each rank computes some channels of the output from all channels of the input.

A convolution's filters are independent of each other, so that rank r can hold part r of them with
their gradients and optimizer's state: parameters are divided, and never sent. What is sent are
activations: outputs are gathered along channels before the next layer, and in backward each rank
has only the part of dx that its own filters contribute, so that these are summed (reduce-scatter,
as each rank needs the channels that it has computed).

It is what tensor parallelism (lesson 16) is for linear layers: good for layers with many parameters
and small images (Krizhevsky, "One weird trick for parallelizing CNNs", 2014; PyDTNN and ParaDL call
it filter parallelism).
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
    frame,
    join,
    linear_backward,
    part,
    turned,
)
from ranks import Array, Rank, main


def train(rank: Rank) -> Array:
    """Train the network of lesson 14 with the filters divided over the ranks."""
    k1, k2, w, b = filters()
    k1, k2 = (part(k, rank.rank, rank.size, axis=3) for k in (k1, k2))  # (3, 3, I, C / P)
    w = part(w, rank.rank, rank.size)  # (C / P, 4): the inputs that this rank has
    for step in range(STEPS):
        images, labels = batch(step)
        x0 = frame(images[..., None])  # (N, H + 2, W + 2, 1)
        y1 = np.maximum(conv(x0, k1), 0)  # (N, H, W, C / P)
        # exercise: the whole input of the second convolution
        x1 = frame(np.concatenate(rank.allgather(y1), axis=-1))  # (N, H + 2, W + 2, C)
        y2 = np.maximum(conv(x1, k2), 0)  # (N, H, W, C / P)
        mean = y2.mean(axis=(1, 2))  # (N, C / P)
        scores = rank.allreduce(mean @ w) + b  # (N, 4): a sum over channels, then over ranks
        _, d = cross_entropy(scores, labels)

        dmean, dw, db = linear_backward(d, mean, w)  # (N, C / P), (C / P, 4), (4,)
        d2 = np.broadcast_to(dmean[:, None, None] / SIDE**2, y2.shape) * (y2 > 0)
        dx = conv(frame(d2), turned(k2))  # (N, H, W, C): what these filters contribute
        d1 = rank.reduce_scatter(np.array_split(dx, rank.size, axis=-1)) * (y1 > 0)
        dk1, dk2 = conv_backward(d1, x0, k1), conv_backward(d2, x1, k2)
        k1, k2 = k1 - RATE / BATCH * dk1, k2 - RATE / BATCH * dk2
        w, b = w - RATE / BATCH * dw, b - RATE / BATCH * db
    whole = [np.concatenate(rank.allgather(k), axis=-1) for k in (k1, k2)]  # to compare
    return join([*whole, np.concatenate(rank.allgather(w)), b])


def bytes_sent(size: int) -> int:
    """Return the bytes of activations in each step, and of the parts that are compared."""
    activations = 2 * BATCH * SIDE**2 * (CHANNELS // size)
    scores = 2 * -(-BATCH * 4 // size)
    parts = (9 + 9 * CHANNELS + 4) * (CHANNELS // size)
    return 8 * (size - 1) * (STEPS * (activations + scores) + parts)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (P - 1) (steps x (2 N H W C / P + 2 ceil(4 N / P)) + parameters / P)",
        "pydtnn/model/partition/rules.py: filters",
    )

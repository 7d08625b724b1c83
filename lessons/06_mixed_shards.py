"""06 Unequal shards: the mean of the ranks' means is not the mean of the samples.

If ranks have different numbers of samples, because the batch does not divide or because a slow rank
gets fewer, each rank's mean gradient counts its samples more the fewer they are. The sum must be of
gradients *summed* over samples, and divided by the samples of the whole batch once. The same holds
for losses, and for samples without a target (padding): divide by the number of targets of all
ranks.

Here rank r has about r + 1 times as many samples as rank 0, which is printed; `BIASED = True` shows
the error.
"""

import numpy as np

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, serial, split
from ranks import Array, Rank, main

BIASED = False
"""Divide by the samples of each rank instead of those of the batch."""


def bounds(size: int) -> list[int]:
    """Return where the samples of each rank begin, and the end: shares of about 1, 2, 3, ..."""
    shares = np.cumsum([0, *range(1, size + 1)])
    return [round(BATCH * share / shares[-1]) for share in shares]


def train(rank: Rank) -> Array:
    """Train with the samples divided unequally."""
    params = parameters()
    begin, end = bounds(rank.size)[rank.rank : rank.rank + 2]
    if rank.rank == 0 and rank.size > 1:
        print(f"samples of the ranks: {np.diff(bounds(rank.size))}")
    for step in range(STEPS):
        x, labels = batch(step)
        _, grads = gradients(params, x[begin:end], labels[begin:end])  # sums over end - begin
        # exercise: what makes the sum over ranks the gradient of the mean loss
        scale = 1 / BATCH
        if BIASED:
            scale = 1 / (end - begin) / rank.size
        total = rank.allreduce(scale * join(grads))  # (n,)
        for p, g in zip(params, split(total, params), strict=True):
            p -= RATE * g
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of the sums of lesson 02: shares do not change them."""
    return STEPS * 2 * (size - 1) * -(-join(parameters()).size // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/data/order.py: assign_shards",
        serial=serial,
    )

"""09 DiLoCo: what local steps have changed is the gradient of an outer optimizer.

As in lesson 08 ranks make H steps alone. The mean change ``d = c - mean of w`` from the common
parameters c is then not applied as it is, but given to a second optimizer, SGD with Nesterov
momentum: ``v <- m v + d; c <- c - r (d + m v)``. Momentum over rounds makes up for steps that have
diverged, so that H can be hundreds (Douillard et al., "DiLoCo: distributed low-communication
training of language models", 2023). With r = 1 and m = 0 it is local SGD.
"""

import numpy as np

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

PERIOD, OUTER_RATE, MOMENTUM = 3, 0.7, 0.9


def inner_steps(outer: Array, begin: int, rank: int, size: int) -> Array:
    """Return the parameters (n,) after `PERIOD` steps of a rank from `outer` (n,)."""
    params = split(outer.copy(), parameters())
    for step in range(begin, begin + PERIOD):
        x, labels = (part(a, rank, size) for a in batch(step))
        _, grads = gradients(params, x, labels)
        for p, g in zip(params, grads, strict=True):
            p -= RATE * size / BATCH * g
    return join(params)


def outer_step(outer: Array, velocity: Array, change: Array) -> None:
    """Move the common parameters, (n,) each."""
    # exercise: Nesterov momentum: the first of three lines
    velocity *= MOMENTUM
    velocity += change
    outer -= OUTER_RATE * (change + MOMENTUM * velocity)


def train(rank: Rank) -> Array:
    """Train each rank alone, with an outer step every `PERIOD` steps."""
    outer = join(parameters())
    velocity = np.zeros_like(outer)
    for begin in range(0, STEPS, PERIOD):
        change = outer - inner_steps(outer, begin, rank.rank, rank.size)
        outer_step(outer, velocity, rank.allreduce(change) / rank.size)
    return outer


def serial(size: int) -> Array:
    """Train `size` copies in one process."""
    outer = join(parameters())
    velocity = np.zeros_like(outer)
    for begin in range(0, STEPS, PERIOD):
        changes = [outer - inner_steps(outer, begin, rank, size) for rank in range(size)]
        outer_step(outer, velocity, sum(changes) / size)
    return outer


def bytes_sent(size: int) -> int:
    """Return the bytes of one sum in `PERIOD` steps."""
    return STEPS // PERIOD * 2 * (size - 1) * -(-join(parameters()).size // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps / H x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/parallel/schemes/diloco.py: DiLoCo",
        serial=serial,
    )

"""10 Compression with error feedback: send the largest tenth, remember the rest.

Most elements of a gradient are small. Each rank sends the k elements of largest magnitude, with
their positions, to all others (allgather: different ranks choose different positions). What is not
sent is not lost: it is added to the gradient of the next step, so that every change is applied
sooner or later. Without this memory training stalls (Seide et al., "1-bit SGD", 2014; Stich et al.,
"Sparsified SGD with memory", 2018).

It is another algorithm than serial training: the reference is one process that does the same for P
gradients, and adds them in the same order, so that the bits are equal. A rank sends ``(P - 1) k``
elements and positions, which beats a ring while ``P k < n``.
"""

from math import ceil

import numpy as np

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

SHARE = 0.1
"""Share of the elements that are sent."""


def compress(gradient: Array, memory: Array) -> tuple[Array, Array]:
    """Return positions (k,) and values (k,) of the largest elements; `memory` keeps the others."""
    memory += gradient  # (n,): what was not sent before belongs to it
    k = ceil(SHARE * memory.size)
    positions = np.sort(np.argpartition(-np.abs(memory), k - 1)[:k])
    values = memory[positions].copy()
    # exercise: what happens to the memory of what is sent?
    memory[positions] = 0
    return positions, values


def local_gradient(params: list[Array], step: int, rank: int, size: int) -> Array:
    """Return what a rank adds to the gradient of the mean loss of the batch, (n,)."""
    x, labels = (part(a, rank, size) for a in batch(step))
    return join(gradients(params, x, labels)[1]) / BATCH


def apply(params: list[Array], total: Array) -> None:
    """Make a step with a gradient (n,)."""
    for p, g in zip(params, split(total, params), strict=True):
        p -= RATE * g


def train(rank: Rank) -> Array:
    """Train with sums of sparse gradients."""
    params, memory = parameters(), np.zeros(join(parameters()).size)
    for step in range(STEPS):
        gradient = local_gradient(params, step, rank.rank, rank.size)
        positions, values = compress(gradient, memory)
        total = np.zeros_like(gradient)
        sent = zip(rank.allgather(positions), rank.allgather(values), strict=True)
        for where, what in sent:
            total[where] += what  # positions of one rank differ, so that `+=` adds each
        apply(params, total)
    return join(params)


def serial(size: int) -> Array:
    """Train in one process, with the memory of each of `size` ranks."""
    params = parameters()
    memories = [np.zeros(join(params).size) for _ in range(size)]
    for step in range(STEPS):
        total = np.zeros_like(memories[0])
        for rank, memory in enumerate(memories):
            where, what = compress(local_gradient(params, step, rank, size), memory)
            total[where] += what
        apply(params, total)
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of k positions and k values, P - 1 times in each step."""
    k = ceil(SHARE * join(parameters()).size)
    return STEPS * (size - 1) * k * (8 + 8)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x (P - 1) k x (8 + 8)",
        "pydtnn/parallel/compression/sparse.py: top_k",
        serial=serial,
    )

"""26 A rank fails, and the others continue.

In data parallelism every rank has the whole network, so that nothing is lost with a rank but its
part of the current step. Three things are needed: to detect the failure (here an empty message
stands for the closed connection of a process that has ended); to agree on it, since a rank that
fails between two messages has sent them to some ranks and not to others; and to repeat the step
with the samples divided over the ranks that remain (Bland et al., "Post-failure recovery of MPI
communication capability", 2013: revoke, shrink, agree).

The last rank fails in step 3 after it has sent its gradient to half of the others. Without the
agreement these would complete the step, and the others would repeat it. The result is that of
serial training, as no samples are lost.
"""

import numpy as np

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, serial, split
from ranks import Array, Rank, main

FAILS_IN_STEP = 3
CLOSED = np.empty(0)
"""What other ranks receive from a rank that has ended."""


def train(rank: Rank) -> Array:
    """Train, and continue without the last rank, which fails if there are several."""
    params, alive, step = parameters(), list(range(rank.size)), 0
    while step < STEPS:
        index, others = alive.index(rank.rank), [r for r in alive if r != rank.rank]
        x, labels = (part(a, index, len(alive)) for a in batch(step))
        gradient = join(gradients(params, x, labels)[1])  # (n,)
        if rank.size > 1 and rank.rank == rank.size - 1 and step == FAILS_IN_STEP:
            for to in others:
                rank.send(gradient if to % 2 == 0 else CLOSED, to)
                rank.send(CLOSED, to)  # where the agreement would be
            for source in others * 2:
                rank.receive(source)  # MPI does not end before all messages are received
            return finish(params)
        for to in others:
            rank.send(gradient, to)
        received = {r: rank.receive(r) for r in others} | {rank.rank: gradient}

        suspected = np.array([float(received[r].size == 0) for r in alive])  # (alive,)
        for to in others:  # agreement: what a rank has detected is sent to all
            rank.send(suspected, to)
        reports = [rank.receive(r) for r in others]
        closed = [report.size == 0 for report in reports]
        for report in reports:
            suspected = np.maximum(suspected, report) if report.size else suspected
        for r, gone in zip(others, closed, strict=True):
            suspected[alive.index(r)] += gone
        if suspected.any():
            # exercise: the ranks that remain
            alive = [r for r, s in zip(alive, suspected, strict=True) if not s]
            if rank.rank == 0:
                print(f"step {step}: a rank has failed, {len(alive)} repeat the step")
            continue  # repeat the step without them
        total = sum(received[r] for r in alive)  # in the same order on all ranks
        for p, g in zip(params, split(total, params), strict=True):
            p -= RATE / BATCH * g
        step += 1
    return join(params)


def finish(params: list[Array]) -> Array:
    """Train the rank that has failed alone: what the others return is compared with it."""
    for step in range(FAILS_IN_STEP, STEPS):
        for p, g in zip(params, gradients(params, *batch(step))[1], strict=True):
            p -= RATE / BATCH * g
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of rank 0: gradients and reports, before, in and after the failure."""
    n = join(parameters()).size
    before = (FAILS_IN_STEP + 1) * (size - 1) * (n + size)  # the step that fails included
    after = (STEPS - FAILS_IN_STEP) * max(size - 2, 0) * (n + size - 1)
    return 8 * (before + after)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (4 (P - 1) (n + P) + 3 (P - 2) (n + P - 1))",
        "pydtnn/tools/survival/recovery.py: RecoveryState",
        serial=serial,
    )

"""Compute against communication against waiting, and who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.analysis.blocks import Blocks, find_blocks
from pydtnn.tracing.timeline import Timeline


@dataclass(frozen=True)
class Usage:
    """What the main thread of a rank did during the training steps.

    Attributes
    ----------
    rank : int
    compute : float
        Time outside of the communicator, in s.
    communication : float
        Time inside of calls and waits, without `waiting`, in s: messages in flight, the rank's
        share of sums, and the cost of the calls.
    waiting : float
        Time inside of waits before the other rank had sent its message or entered the collective
        call, in s.
    """

    rank: int
    compute: float
    communication: float
    waiting: float

    @property
    def total(self) -> float:
        """Time of the steps, in s."""
        return self.compute + self.communication + self.waiting


def usage(timeline: Timeline, blocks: Blocks | None = None) -> list[Usage]:
    """Return the usage of each rank; empty if no training step was recorded.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.
    """
    blocks = blocks or find_blocks(timeline)
    steps, waited = timeline.steps, blocks.waiting()[0]
    found = []
    for rank in range(timeline.size if len(steps) else 0):
        here = np.flatnonzero(blocks.rank == rank)
        here = here[steps.place(rank, blocks.start[here]) >= 0]
        total = int((steps.stop[:, rank] - steps.start[:, rank]).sum())
        inside = int((blocks.stop[here] - blocks.start[here]).sum())
        waiting = int(waited[here].sum())
        parts = (total - inside, inside - waiting, waiting)
        found.append(Usage(rank, *(part / 1e9 for part in parts)))
    return found


def waits(timeline: Timeline, blocks: Blocks | None = None) -> np.ndarray:
    """Return how long each rank has waited for each other during the training steps.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.

    Returns
    -------
    ndarray of float, shape ``(ranks, ranks)``
        Element (r, q): time that rank r has waited for rank q, in s.
    """
    blocks = blocks or find_blocks(timeline)
    shares = blocks.waiting()[1] / 1e9
    found = np.zeros((timeline.size, timeline.size))
    for rank in range(timeline.size):
        here = np.flatnonzero(blocks.rank[blocks.block] == rank)
        here = here[timeline.steps.place(rank, blocks.start[blocks.block[here]]) >= 0]
        np.add.at(found[rank], blocks.peer[here], shares[here])
    return found


def traffic(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return how much each rank has sent to each other.

    Returns
    -------
    ndarray of int, shape ``(ranks, ranks)``
        Element (r, q): bytes of the messages from rank r to rank q, in B.
    ndarray of int, shape ``(ranks, ranks)``
        Number of these messages.
    """
    messages = np.concatenate([timeline.messages.sent, timeline.messages.unmatched_sent])
    messages = messages[messages["target"] >= 0]
    shape = (timeline.size, timeline.size)
    nbytes, count = np.zeros(shape, "i8"), np.zeros(shape, "i8")
    np.add.at(nbytes, (messages["source"], messages["target"]), messages["nbytes"])
    np.add.at(count, (messages["source"], messages["target"]), 1)
    return nbytes, count

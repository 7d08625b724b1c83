"""Times of the collectives of an MPI library, measured on the ranks of a job.

Libraries choose other algorithms than the best ones: Open MPI 5 reduces whole arrays to one rank
before it scatters them, and its non-blocking allreduce sends three times as many bytes as a ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.rule import without_rule

LENGTHS = (64, 1 << 13, 1 << 17, 1 << 20)
"""Lengths of the whole arrays that are measured, in B."""

REPEATS = 3
"""Repetitions of each measurement, after one that opens connections; the median is used."""


@dataclass(frozen=True)
class MeasuredLibrary:
    """Times of collectives of a number of ranks.

    Attributes
    ----------
    ranks : int
    seconds : mapping of str to tuple of float
        For each kind of call the times of arrays of `LENGTHS`, in s.
    """

    ranks: int
    seconds: Mapping[str, tuple[float, ...]]

    def time(self, kind: str, nbytes: int, ranks: int) -> float | None:
        """Return the time of a call in s, by linear interpolation; None if it was not measured."""
        times = self.seconds.get(kind)
        if times is None or ranks != self.ranks:
            return None
        if nbytes <= LENGTHS[0]:
            return times[0]
        points = list(pairwise(zip(LENGTHS, times, strict=True)))
        (a, t), (b, u) = next((p for p in points if nbytes <= p[1][0]), points[-1])
        return t + (nbytes - a) / (b - a) * max(u - t, 0.0)

    @classmethod
    def measure(cls, comm: Communicator) -> MeasuredLibrary:
        """Measure collectives of all ranks of a job. Collective: all ranks call it.

        Returns
        -------
        MeasuredLibrary
            Equal on all ranks.
        """
        comm = without_rule(comm)
        found: dict[str, list[float]] = {}
        for nbytes in LENGTHS:
            for kind, call in _calls(comm, nbytes // 4).items():
                found.setdefault(kind, []).append(_measure(comm, call))
        return cls(comm.size, {kind: tuple(times) for kind, times in found.items()})


def _calls(comm: Communicator, n: int) -> dict[str, Callable[[], None]]:
    """Return a call of each kind with an array of n elements."""
    n -= n % comm.size
    whole, part = np.zeros(n, "float32"), np.zeros(n // comm.size, "float32")
    counts = [len(part)] * comm.size
    return {
        "allreduce": lambda: comm.iallreduce(whole).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, counts, part),
        "allgather": lambda: comm.allgather(part, counts, whole),
        "broadcast": lambda: comm.broadcast(whole),
    }


def _measure(comm: Communicator, call: Callable[[], None]) -> float:
    """Return the time of a call on its slowest rank, in s."""
    times = []
    for _ in range(1 + REPEATS):
        comm.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(map(max, zip(*comm.gather_object(times[1:]), strict=True)))

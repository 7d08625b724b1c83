"""Times of many ranks that compute alike: one of them runs, with the clocks of all in an array.

The program of rank 0 is executed once, in this thread. Every rank is taken to do the same at the
time of its own clock: the ranks have parts of equal length, and make the same calls. Sums by
schedules are replayed row by row (`pydtnn.perfmodel.engine.rows`). The bytes of a sum that is
started while others are in progress pass after theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.schedules.network import Network
from pydtnn.comm.schedules.rule import by_rule
from pydtnn.perfmodel.compute.base import ComputeCosts
from pydtnn.perfmodel.engine.processor import Processor
from pydtnn.perfmodel.engine.rows import Replay
from pydtnn.perfmodel.virtual.clock import SegmentClock
from pydtnn.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.perfmodel.virtual.library import volume
from pydtnn.utils import clock
from pydtnn.utils.observer import Observer


class DifferentError(ValueError):
    """Ranks do not all make the same collective calls; the message names the difference."""


class Clocks(SegmentClock):
    """Virtual times of all ranks.

    Parameters
    ----------
    ranks : int
    costs : ComputeCosts
        Of every rank.
    disturbances : Disturbances

    Attributes
    ----------
    times : ndarray (ranks,)
        In s.
    """

    def __init__(self, ranks: int, costs: ComputeCosts, disturbances: Disturbances) -> None:
        super().__init__(costs)
        self.times = np.zeros(ranks)
        self._ranks, self._disturbances = np.arange(ranks), disturbances

    def now_ns(self) -> int:
        """Return the time of the last rank, in ns."""
        return round(1e9 * self.times.max())

    def spend(self, seconds: float) -> None:
        if self._disturbances is NONE:
            self.times += seconds
            return
        self.times += seconds * self._disturbances.factors(self.times, self.steps, self._ranks)
        for one in self._disturbances.failures:
            self._disturbances.check_failure(one.rank, self.times[one.rank])


class Alike(Communicator):
    """Rank 0 of ranks that do the same.

    Parameters
    ----------
    network : Network
        With the host of every rank.
    clocks : Clocks
    processor : Processor

    Raises
    ------
    DifferentError
        From calls whose partners are not known without the other ranks: messages between two ranks,
        and groups of some of them.
    """

    def __init__(self, network: Network, clocks: Clocks, processor: Processor) -> None:
        super().__init__(0, network.hosts)
        self._network, self._clocks, self._processor = network, clocks, processor
        self._ended = np.zeros(self.size)  # when each rank has ended the sums started so far
        self._replays: dict[Any, Replay] = {}
        names = list(dict.fromkeys(network.hosts))
        ends = (names[0], names[1] if len(names) > 1 else names[0])
        self._route = network.routes[ends]

    @property
    def own_observer(self) -> Observer:
        return self._clocks

    def barrier(self) -> None:
        self._library("barrier", 0).wait()

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def abort(self, code: int) -> None:
        raise RuntimeError(f"Alike: aborted with status {code}")

    def follow(self, algorithm: Any, array: np.ndarray, chunk_bytes: int, active: int) -> Request:
        replay = self._replays.get(algorithm)
        if replay is None:
            replay = self._replays[algorithm] = Replay(algorithm, self._network)
        call = self._processor.call
        ends = replay.ends(self._clocks.times, array.nbytes, call)
        # Latencies overlap with those of sums in progress, but not the bytes.
        self._ended = np.maximum(ends, self._ended + replay.busy(array.nbytes))
        return _Ending(self._clocks, self._ended, call * replay.calls)

    def _library(self, kind: str, nbytes: int) -> Request:
        """Start a call of the library, which all ranks leave together."""
        self._clocks.times += self._processor.call
        begin = max(self._clocks.times.max(), self._ended.max())
        latency = self._route.latency * ceil(log2(self.size)) if self.size > 1 else 0.0
        passed = volume(kind, nbytes, self.size) / self._route.bandwidth
        self._ended = np.full(self.size, begin + latency + passed)
        return _Ending(self._clocks, self._ended)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return self._library("allreduce", array.nbytes)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self._library("broadcast", array.nbytes).wait()

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._library("reduce_scatter", array.nbytes).wait()

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._library("allgather", out.nbytes).wait()

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        raise DifferentError("a message between two ranks")

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        raise DifferentError("a message between two ranks")

    def _split(self, color: int, key: int) -> Communicator:
        if color:
            raise DifferentError("a group of some ranks")
        group = Alike(self._network, self._clocks, self._processor)
        group._replays = self._replays
        return group


class _Ending(Request):
    """A call that ends at known times."""

    def __init__(self, clocks: Clocks, ends: np.ndarray, spent: np.ndarray | float = 0.0) -> None:
        self._clocks, self._ends = clocks, ends
        self._spent = spent  # time of the processors, which did not compute meanwhile

    def wait(self) -> None:
        spent, self._spent = self._spent, 0.0
        np.maximum(self._clocks.times + spent, self._ends, out=self._clocks.times)

    def test(self) -> bool:
        if not (self._ends <= self._clocks.times).all():
            return False
        self.wait()
        return True


def run_alike(
    function: Callable[..., Any],
    *args: Any,
    network: Network,
    costs: ComputeCosts,
    processor: Processor,
    disturbances: Disturbances = NONE,
) -> tuple[Any, np.ndarray]:
    """Call `function(comm, *args)` as rank 0 of ranks that compute alike.

    Parameters
    ----------
    function, args, network, costs, processor, disturbances
        See `run_virtual`; `function` must not depend on values, which no other rank computes. Links
        are slow during the whole run or not at all.

    Returns
    -------
    any
        Return value of the function.
    ndarray (ranks,)
        Virtual time at which each rank has ended, in s.
    """
    clocks = Clocks(len(network.hosts), costs, disturbances)
    network = disturbances.network_at(network, 0.0)
    with clock.used(clocks):
        result = function(by_rule(Alike(network, clocks, processor)), *args)
    return result, clocks.times

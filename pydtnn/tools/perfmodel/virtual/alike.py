"""Times of many ranks that compute alike: one of them runs, with the clocks of all in an array.

The program is executed in this thread, as rank 0. Every rank is taken to do the same at the time of
its own clock: the ranks have parts of equal length, and make the same calls. Sums by
schedules are replayed row by row (`pydtnn.tools.perfmodel.engine.rows`). The bytes of a sum that is
started while others are in progress pass after theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.executor import Simulated
from pydtnn.comm.schedules.rule import by_rule
from pydtnn.comm.traffic import Traffic
from pydtnn.tools.perfmodel.compute.base import ComputeCosts
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.engine.rows import RowTimes
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual.clock import SegmentClock
from pydtnn.tools.perfmodel.virtual.communicator import library_seconds
from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.utils import clock
from pydtnn.utils.request import Request


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
    slowdown : float
        How much longer all ranks compute than with cores of their own.

    Attributes
    ----------
    times : ndarray (ranks,)
        In s.
    ended : ndarray (ranks,)
        When each rank has ended the operations started so far, in s.
    calls : list of tuple
        Kind and length of every operation, by which ranks are compared.
    """

    def __init__(
        self, ranks: int, costs: ComputeCosts, disturbances: Disturbances, slowdown: float = 1.0
    ) -> None:
        super().__init__(costs)
        self._slowdown = slowdown
        self.times, self.ended = np.zeros(ranks), np.zeros(ranks)
        self.calls: list[tuple[str, int]] = []
        self._ranks, self._disturbances = np.arange(ranks), disturbances

    def now(self) -> float:
        """Return the time of the last rank, in s."""
        return float(self.times.max())

    def spend(self, seconds: float) -> None:
        seconds *= self._slowdown
        if self._disturbances is NONE:
            self.times += seconds
            return
        self.times += seconds * self._disturbances.factors(self.times, self.steps, self._ranks)


class Alike(Simulated):
    """One of ranks that do the same.

    Parameters
    ----------
    rank : int
    network : Network
        With the host of every rank.
    clocks : Clocks
    processor : Processor
    replays : dict
        Schedules that are known, by algorithm.
    traffic : Traffic, optional
        That of the group from which this one was split off.

    Raises
    ------
    DifferentError
        From messages between two ranks, whose times are not known without the other one.
    """

    def __init__(
        self,
        rank: int,
        network: Network,
        clocks: Clocks,
        processor: Processor,
        replays: dict[Any, RowTimes],
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(rank, network.hosts, traffic)
        self._network, self._clocks, self._processor = network, clocks, processor
        self._replays = replays

    def _barrier(self) -> None:
        self._library("barrier", 0).wait()

    def _gather_object(self, value: Any) -> list[Any]:
        self._clocks.calls.append(("gather_object", 0))
        return [value] * self.size

    def abort(self, code: int) -> None:
        raise RuntimeError(f"Alike: aborted with status {code}")

    def follow(self, algorithm: Any, array: np.ndarray) -> Request:
        replay = self._replays.get(algorithm)
        if replay is None:
            replay = self._replays[algorithm] = RowTimes(algorithm, self._network)
        self._clocks.calls.append((str(algorithm), array.nbytes))
        call, clocks = self._processor.call, self._clocks
        ends = replay.ends(self._clocks.times, array.nbytes, call)
        # Latencies overlap with those of sums in progress, but not the bytes.
        clocks.ended = np.maximum(ends, clocks.ended + replay.busy(array.nbytes))
        return _Ending(clocks, clocks.ended, call * replay.calls)

    def _library(self, kind: str, nbytes: int) -> Request:
        """Start a call of the library, which all ranks leave together."""
        clocks = self._clocks
        clocks.calls.append((kind, nbytes))
        clocks.times += self._processor.call
        begin = max(clocks.times.max(), clocks.ended.max())
        lasts = library_seconds(kind, nbytes, self._network, range(self.size))
        clocks.ended = np.full(self.size, begin + lasts)
        return _Ending(clocks, clocks.ended)

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

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        raise DifferentError("a message between two ranks")

    def _split(self, color: int, key: int) -> Communicator:
        self._clocks.calls.append(("split", color))
        shared = self._network, self._clocks, self._processor, self._replays, self.traffic
        return Alike(self.rank, *shared)


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
    slowdown: float = 1.0,
) -> tuple[Any, np.ndarray]:
    """Call `function(comm, *args)` as one of ranks that compute alike.

    It is called for the first two ranks and the last one, which must make the same calls.

    Parameters
    ----------
    function, args, network, costs, processor, disturbances
        See `run_virtual`; `function` must not depend on values, which no other rank computes.
    slowdown : float
        See `Clocks`.

    Returns
    -------
    any
        Return value of the function for rank 0.
    ndarray (ranks,)
        Virtual time at which each rank has ended, in s.

    Raises
    ------
    DifferentError
        If ranks differ in their calls.
    """
    ranks = len(network.hosts)
    replays: dict[Any, RowTimes] = {}
    processor = processor._replace(call=slowdown * processor.call)
    results, all_clocks = [], []
    for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
        clocks = Clocks(ranks, costs, disturbances, slowdown)
        with clock.used(clocks):
            comm = by_rule(Alike(rank, network, clocks, processor, replays))
            results.append(function(comm, *args))
        all_clocks.append(clocks)
    if any(clocks.calls != all_clocks[0].calls for clocks in all_clocks):
        raise DifferentError("collective calls or groups that differ between ranks")
    return results[0], all_clocks[0].times

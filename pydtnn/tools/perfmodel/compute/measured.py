"""Measurement of the compute of each rank of a job.

A rank runs its steps with real kernels while its communicator is detached (`Detachable`). All ranks
are measured at the same time: those of a host share caches and the bandwidth of memory in a real
run, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.comm.waiting import sleeps
from pydtnn.comm.wrapper import Wrapper
from pydtnn.tools.perfmodel.compute.profile import Profile, RankProfile
from pydtnn.tools.perfmodel.compute.segments import SegmentTimes
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank
from pydtnn.training.preparation import autotune
from pydtnn.training.workload import Workload
from pydtnn.utils.request import Completed, Request

SPREAD = 0.1
"""Standard deviation of received floats."""

MAX_REPEATED = 1024
"""Elements up to which arrays of floats, too, are received as they were sent: numbers of rows."""

WAIT = 50e-6
"""Time for which a detached rank polls or sleeps when it waits, in s.

Ranks that poll between two layers compute differently from a rank that never waits: kernels of the
ranks of a host do not run at the same time, and find less in the caches. Measured with 2 ranks on 2
cores that share a host: without it, the layers of a ResNet-20 that is cut into stripes were 8 %
faster than in training.
"""

IDLE = 2e-3
"""Time for which one sleeps whose core may be idle in waits, in s.

A core that was idle is slow at first, that of a virtual machine most of all. With 4 ranks on
emulated hosts, the layers of a ResNet-20 in stripes took 45 ms without it, and 60 ms in training.
"""


class Detachable(Wrapper):
    """Forward every call to another communicator, except within `detached`.

    The compute time of one rank of several is measured without those of the others: after the
    groups of a run have been created by all ranks, `detached` lets one of them run steps alone. Its
    messages have the lengths of real ones; received values are arbitrary, but finite and not
    subnormal, so that kernels take their usual time.

    Parameters
    ----------
    inner : Communicator
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._state = _State()

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group, which is detached together with this one."""
        child = Detachable(group)
        child._state = self._state
        return child

    @contextmanager
    def detached(self, pause: float = 0.0) -> Iterator[None]:
        """Context in which operations of this group and its relatives complete at once.

        Where ranks wait, they sleep for `pause` s, in which others use their core; 0: they poll.
        """
        self._state.detached, self._state.pause = True, pause
        try:
            yield
        finally:
            self._state.detached = False

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a blocking call, or complete it without other ranks."""
        if not self._state.detached:
            return call(*args)
        if what == "split":
            raise ValueError(
                "Detachable: groups cannot be created while a rank is measured alone; create them "
                "when the exchange starts"
            )
        if what == "gather_object":
            return [args[0]] * self.size
        if what == "reduce_scatter":
            array, counts, out = args
            begin = sum(counts[: self.rank])
            out[:] = array[begin : begin + len(out)]
        if what == "allgather":
            array, counts, out = args  # this rank's part takes the place of all
            np.concatenate([np.resize(array, count) for count in counts], out=out)
        return None

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation, or complete it without other ranks."""
        if not self._state.detached:
            return call(*args)
        if what == "recv":
            self._state.receive(args[0])
        if what == "send":
            self._state.send(args[0])
            return Completed()
        return _Waited(self._state.pause)


class _Waited(Completed):
    """A completed operation for which a rank sleeps, or polls once."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def wait(self) -> None:
        time.sleep(self._pause)
        end = time.perf_counter() + (0.0 if self._pause else WAIT)
        while time.perf_counter() < end:
            pass


class _State:
    """Whether groups are detached, and values to receive."""

    def __init__(self) -> None:
        self.detached, self.pause = False, 0.0
        self._random: dict[np.dtype, np.ndarray] = {}
        self._sent: dict[tuple[np.dtype, int], np.ndarray] = {}

    def send(self, array: np.ndarray) -> None:
        """Keep integers, which may be indices, for the next receive of such an array."""
        if not np.issubdtype(array.dtype, np.floating) or array.size <= MAX_REPEATED:
            self._sent[array.dtype, array.size] = array.copy()

    def receive(self, array: np.ndarray) -> None:
        """Fill an array with values that were sent before, or with random floats."""
        sent = self._sent.get((array.dtype, array.size))
        if sent is not None or not np.issubdtype(array.dtype, np.floating):
            array[:] = 0 if sent is None else sent
            return
        values = self._random.get(array.dtype)
        if values is None or len(values) < len(array):
            rng = np.random.default_rng(0)
            values = (SPREAD * rng.standard_normal(len(array))).astype(array.dtype)
            self._random[array.dtype] = values
        array[:] = values[: len(array)]


STEPS = 9
"""Steps that are measured."""

WARM_UP = 2
"""Steps before them."""


def measure_job(
    workload: Workload,
    comm: Communicator,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    shared: bool = False,
) -> Profile:
    """Measure the compute of all ranks of a job at the same time. Collective.

    Parameters
    ----------
    workload : Workload
        Of as many ranks as the job has.
    comm : Communicator
    steps, warm_up : int
        Steps that are measured, and steps before them.
    shared : bool
        Whether there are fewer cores than ranks. Times are then those of the processor, which do
        not contain the time in which other ranks compute on the same core; a prediction from them
        requires `SharedCores`.
    """
    times = SegmentTimes(time.thread_time_ns if shared else time.perf_counter_ns)
    detachable = Detachable(comm)
    rank = WorkloadRank(workload, detachable, observers=[times])
    trainer = rank.trainer
    times.traffic = trainer.comm.traffic
    found, spent = [], np.zeros(2)  # of the processor, and in all
    comm.barrier()
    with detachable.detached((IDLE if sleeps() else WAIT) if shared else 0.0):
        autotune(trainer.model, Serial(), rank.largest, training=True)
        times.take()
        for _ in range(warm_up + steps):
            comm.barrier()
            begin = np.array([time.thread_time(), time.perf_counter()])
            rank.step()
            spent += np.array([time.thread_time(), time.perf_counter()]) - begin
            found.append(times.take())
    away = 0.0 if shared else 1 - float(spent[0] / spent[1])
    own = RankProfile(tuple(found[warm_up:]), times.passed, away)
    return Profile(tuple(comm.gather_object(own)))

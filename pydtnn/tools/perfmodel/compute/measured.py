"""Measurement of the compute of each rank of a workload on this machine.

A rank runs its steps with real kernels while its communicator is detached (`Detachable`). Ranks of
one host are measured at the same time, by as many processes, because they share caches and the
bandwidth of memory in a real run, too.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.waiting import sleeps
from pydtnn.comm.wrapper import Wrapper
from pydtnn.data.order import assign_shards
from pydtnn.tools.perfmodel.compute.base import Label
from pydtnn.tools.perfmodel.compute.profile import Profile, RankProfile
from pydtnn.tools.perfmodel.compute.segments import SegmentTimes
from pydtnn.training.preparation import autotune
from pydtnn.training.workload import Workload, WorkloadRank
from pydtnn.utils.machine import cpu_model
from pydtnn.utils.request import Completed, Request
from pydtnn.utils.validate import check_int

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
            self._gather(*args)
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

    def _gather(self, array: np.ndarray, counts: Sequence[int], out: np.ndarray) -> None:
        """Use this rank's part for those of all ranks."""
        begin = 0
        for count in counts:
            part = out[begin : begin + count]
            part[:] = array if len(array) == count else np.resize(array, count)
            begin += count


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


WHO = "measure"

STEPS = 9
"""Steps that are measured."""

WARM_UP = 2
"""Steps before them."""

MAX_EACH = 4
"""Number of ranks up to which each one is measured; of more, those that compute differently."""

TIMEOUT_S = 600.0
"""Longest time for the measurement of a rank in another process, in s."""

Steps = tuple[list[dict[Label, float]], int]
"""The segments of each step, and the samples of a pass."""


def measure(
    workload: Workload, *, copies: int = 1, steps: int = STEPS, warm_up: int = WARM_UP
) -> Profile:
    """Measure the compute of the ranks of a workload on this machine, without MPI.

    Parameters
    ----------
    workload : Workload
    copies : int
        Ranks that compute at the same time on a host, and are measured at the same time, each by a
        process of its own if there are several.
    steps, warm_up : int
        Steps that are measured, and steps before them.
    """
    copies = check_int(WHO, "copies", copies, at_least=1)
    steps = check_int(WHO, "steps", steps, at_least=1)
    warm_up = check_int(WHO, "warm_up", warm_up, at_least=0)
    like = alike(workload)
    ranks = sorted(set(like))
    found = {}
    for first in range(0, len(ranks), copies):
        together = ranks[first : first + copies]
        others = [ranks[i % len(ranks)] for i in range(copies - len(together))]
        times = _measure_together(workload, [*together, *others], warm_up + steps)
        for rank, (own, samples) in zip(together, times, strict=False):
            found[rank] = RankProfile(tuple(own[warm_up:]), samples)
    return Profile(profile_key(workload, copies), found, like)


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
    comm, steps, warm_up
        See `measure`.
    shared : bool
        Whether there are fewer cores than ranks. Times are then those of the processor, which do
        not contain the time in which other ranks compute on the same core; a prediction from them
        requires `SharedCores`.
    """
    own = _measure_rank(workload, comm, warm_up + steps, comm.barrier, shared)
    ranks = {
        rank: RankProfile(tuple(steps[warm_up:]), samples)
        for rank, (steps, samples) in enumerate(comm.gather_object(own))
    }
    return Profile(profile_key(workload, comm.size), ranks, tuple(range(comm.size)))


def profile_key(workload: Workload, copies: int = 1) -> dict[str, Any]:
    """Return all that determines measured times.

    That is the workload, the ranks that are measured at the same time, and this machine.
    """
    isa = workload.create_backend().isa
    return workload.key() | {"copies": copies, "machine": cpu_model(), "isa": isa}


def alike(workload: Workload) -> tuple[int, ...]:
    """Return for each rank the first one that computes the same.

    >>> alike(Workload("mlp", (4, 4, 1), batch=64, axes={"data": 8, "filter": 2}))
    (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1)
    """
    first: dict[Any, int] = {}
    found = []
    data = workload.data
    for rank in range(workload.ranks):
        position: dict[str, int] = {}
        rest = rank
        for axis in reversed([*workload.axes]):
            rest, position[axis] = divmod(rest, workload.axes[axis])
        place = position.pop("data", 0)
        rows, _ = assign_shards(workload.batch, data, place, data)
        part = (*position.values(), rows.stop - rows.start)
        found.append(rank if workload.ranks <= MAX_EACH else first.setdefault(part, rank))
    return tuple(found)


def _measure_together(workload: Workload, ranks: Sequence[int], steps: int) -> list[Steps]:
    """Measure ranks at the same time, in processes if there are several."""
    if len(ranks) == 1:
        return [_measure_thread(workload, ranks[0], steps, lambda: None)]
    context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
    barrier, results = context.Barrier(len(ranks)), context.Queue()
    processes = [
        context.Process(
            target=_run_process, args=(workload, rank, place, steps, barrier, results), daemon=True
        )
        for place, rank in enumerate(ranks)
    ]
    for process in processes:
        process.start()
    found: list[Steps] = [([], 0) for _ in ranks]
    try:
        for _ in ranks:
            place, times, error = _next(results, processes)
            if error:
                raise RuntimeError(f"{WHO}: rank {ranks[place]} failed: {error}")
            found[place] = times
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _next(results: Any, processes: Sequence[Any]) -> tuple[int, Steps, str]:
    """Return the next result; raise RuntimeError if a process has ended without one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            found: tuple[int, Steps, str] = results.get(timeout=1.0)
            return found
        except Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                break
    raise RuntimeError(f"{WHO}: a process that measures a rank has ended or does not answer")


def _run_process(
    workload: Workload, rank: int, place: int, steps: int, barrier: Barrier, results: Any
) -> None:
    """Measure a rank in a process of its own."""
    try:
        times = _measure_thread(workload, rank, steps, barrier.wait)
        results.put((place, times, ""))
    except Exception as error:
        barrier.abort()
        results.put((place, ([], 0), f"{type(error).__name__}: {error}"))


def _measure_thread(
    workload: Workload, rank: int, steps: int, together: Callable[[], object]
) -> Steps:
    """Measure one rank, while the others are threads that wait."""

    def run(comm: Communicator) -> Steps:
        if comm.rank == rank:
            return _measure_rank(workload, comm, steps, together)
        WorkloadRank(workload, comm)
        comm.barrier()
        return [], 0

    found: Steps = run_threads(workload.ranks, run)[rank]
    return found


def _measure_rank(
    workload: Workload,
    comm: Communicator,
    steps: int,
    together: Callable[[], object],
    shared: bool = False,
) -> Steps:
    """Run steps of this rank with detached communicators."""
    times = SegmentTimes(time.thread_time_ns if shared else time.perf_counter_ns)
    detachable = Detachable(comm)
    rank = WorkloadRank(workload, detachable, observers=[times])
    trainer = rank.trainer
    times.traffic = trainer.comm.traffic
    found = []
    comm.barrier()
    with detachable.detached((IDLE if sleeps() else WAIT) if shared else 0.0):
        autotune(trainer.model, Serial(), rank.largest, training=True)
        times.take()
        for _ in range(steps):
            together()
            rank.step()
            found.append(times.take())
    return found, times.passed

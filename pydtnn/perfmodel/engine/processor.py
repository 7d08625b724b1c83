"""The time of a rank's processor for messages, from a platform or measured in a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import ceil, inf
from statistics import median
from typing import NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.auto import create_allreduce
from pydtnn.comm.schedules.network import Network
from pydtnn.comm.waiting import MIN_SLEEP_S, number_of_tests, pause, sleeps
from pydtnn.perfmodel.engine.between import measure_copy, measure_eager
from pydtnn.perfmodel.platform import Platform, read_collective

SHORT_BYTES, LONG_BYTES = 64, 1 << 20
"""Lengths of the arrays whose times are measured, in B."""

REPEATS = 15
"""Repetitions of each measurement, after two that open connections; the median is used."""

CACHED = 1 << 20
"""Bytes of the caches of a core that other ranks may replace."""

CACHE = 4 << 20
"""Bytes that are written before each repetition: calls of a training step find cold caches."""


class Processor(NamedTuple):
    """What messages cost the processor of a rank.

    Attributes
    ----------
    call : float
        Time of each call that starts an operation, and of the wait for it, in s.
    copy : float
        Time to copy a byte that is sent to another host or received from one, in s/B. Those inside
        a host are copied within the bandwidth of the network.
    add : float
        Time per byte of a library's allreduce inside a host, during which the rank adds and copies,
        in s/B; 0: it takes the time of messages.
    library : callable or None
        `library(kind, nbytes, ranks)` returns the time of another collective of the MPI library in
        s, or None for that of closed formulas, as by default.
    eager : float
        Bytes up to which a message between hosts travels while its ranks compute; a longer one
        only proceeds when they are in calls of the communicator.
    wake : float or None
        Time by which a sleep is longer than it should be, in s, if ranks sleep while they wait
        (`pydtnn.comm.supervision`); None: they poll.
    test : float
        Time of the processor for a sleep and the test after it, in s, if ranks sleep while they
        wait.
    switch : float
        Time by which computation is longer after a wait, in s, because other ranks have used the
        caches of the core: 0 if each rank has its own.
    """

    call: float = 0.0
    copy: float = 0.0
    add: float = 0.0
    library: Callable[[str, int, int], float | None] | None = None
    eager: float = inf
    wake: float | None = None
    test: float = 0.0
    switch: float = 0.0

    def notice(self, waited: float) -> float:
        """Return how late on average a rank notices the end of what it has waited for, in s."""
        return 0.0 if self.wake is None else pause(waited) / 2 + self.wake

    def testing(self, waited: float) -> float:
        """Return the time of the processor for the tests of a wait of so many seconds, in s."""
        each = self.test + (self.wake or 0.0)
        return self.test * number_of_tests(waited, each) if self.test else 0.0

    @classmethod
    def of(cls, platform: Platform) -> Processor:
        """Return the processor of a platform."""
        messages = platform.messages
        copy, add = (1 / r if r else 0.0 for r in (messages.copy, messages.allreduce))
        return cls(
            messages.call,
            copy,
            add,
            library=_library(messages.collectives) if messages.collectives else None,
            eager=messages.eager or inf,
            wake=messages.wake,
            test=messages.test,
            switch=messages.switch,
        )

    @classmethod
    def measure(cls, comm: Communicator, network: Network | None = None) -> Processor:
        """Measure the processor of the ranks of a job. Collective: all ranks call it.

        Parameters
        ----------
        comm : Communicator
        network : Network, optional
            Of the job; by default it is measured if there are several hosts.

        Returns
        -------
        Processor
            Equal on all ranks.
        """
        if comm.size == 1:
            return cls()
        host = comm.split_by_host()
        short, long = (np.zeros(n // 4, "float32") for n in (SHORT_BYTES, LONG_BYTES))
        received, cold = np.zeros_like(short), np.zeros(CACHE, "uint8")
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def exchange() -> float:
            begin = time.perf_counter()
            comm.exchange([(short, after)], [(received, before)]).wait()
            return time.perf_counter() - begin

        def ring() -> float:
            """Those of a schedule; its waits take no time of the processor if ranks sleep."""
            begin = time.thread_time()
            scheduled.allreduce(elements)
            return (time.thread_time() - begin) / (2 * comm.size - 2)

        wake = comm.gather_object(_measure_wake())[0]
        scheduled, elements = create_allreduce("ring", comm), np.zeros(comm.size, "float32")
        exchanged = _measure(comm, exchange if wake is None else ring, cold)
        # gradients have just been computed, so they are in the cache of their rank
        sums = [_measure(host, partial(_add_up, host, array), array) for array in (short, long)]
        add = max(sums[1] - sums[0], 0.0) / (LONG_BYTES - SHORT_BYTES) if host.size > 1 else 0.0
        add /= ceil(host.size / (os.cpu_count() or 1))  # the time for which a rank has a core
        several = len({*comm.hosts}) > 1
        if several and network is None:
            network = Network.measure(comm)
        copy = measure_copy(comm, network) if several and network else 0.0
        eager = measure_eager(comm, network) if several and network else inf
        host.free()
        test = 0.0 if wake is None else _measure_test(comm)
        found = comm.gather_object((exchanged / 2, add, copy, test, _measure_switch(comm)))
        call, add, copy, test, switch = (median(values) for values in zip(*found, strict=True))
        return cls(call, copy, add, eager=eager, wake=wake, test=test, switch=switch)


def _library(seconds: Mapping[str, float]) -> Callable[[str, int, int], float | None]:
    """Return a function that interpolates the times of collectives of a platform linearly."""
    table: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for name, measured in seconds.items():
        kind, ranks, length = read_collective(name)
        table.setdefault((kind, ranks), []).append((length, measured))
    for points in table.values():
        points.sort()

    def time_of(kind: str, nbytes: int, ranks: int) -> float | None:
        points = table.get((kind, ranks))
        if points is None:
            return None
        if nbytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        pairs = list(pairwise(points))
        (a, t), (b, u) = next((pair for pair in pairs if nbytes <= pair[1][0]), pairs[-1])
        return t + (nbytes - a) / (b - a) * max(u - t, 0.0)

    return time_of


def _measure(comm: Communicator, operation: Callable[[], float], written: np.ndarray) -> float:
    """Return the time that an operation of all ranks returns after writing an array, in s."""
    times = []
    for _ in range(2 + REPEATS):
        written.fill(1)
        comm.barrier()
        times.append(operation())
    return median(times[2:])


def _add_up(comm: Communicator, array: np.ndarray) -> float:
    begin = time.perf_counter()
    comm.iallreduce(array).wait()
    return time.perf_counter() - begin


def _measure_switch(comm: Communicator) -> float:
    """Return the time to read a rank's cache again after it has waited for the others, in s."""
    array, times = np.ones(CACHED // 4, "float32"), []
    for _ in range(2 + REPEATS):
        np.add(array, 1, out=array)
        comm.barrier()
        begin = time.thread_time()
        np.add(array, 1, out=array)
        cold = time.thread_time()
        np.add(array, 1, out=array)
        times.append((cold - begin) - (time.thread_time() - cold))
    return max(median(times[2:]), 0.0)


def _measure_wake() -> float | None:
    """Return by how much sleeps are too long if ranks sleep while they wait, in s."""
    if not sleeps():
        return None
    times = []
    for _ in range(2 + REPEATS):
        begin = time.perf_counter()
        time.sleep(MIN_SLEEP_S)
        times.append(time.perf_counter() - begin)
    return max(median(times) - MIN_SLEEP_S, 0.0)


def _measure_test(comm: Communicator) -> float:
    """Return the time of the processor for a sleep and a test of a message, in s."""
    array, times = np.zeros(1), []
    request = comm.irecv(array, (comm.rank - 1) % comm.size)
    for _ in range(2 + REPEATS):
        begin = time.thread_time()
        time.sleep(MIN_SLEEP_S)
        request.test()
        times.append(time.thread_time() - begin)
    comm.barrier()
    comm.send(array.copy(), (comm.rank + 1) % comm.size)
    request.wait()
    return median(times[2:])

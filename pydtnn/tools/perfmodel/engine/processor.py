"""The time of a rank's processor for messages, from a platform or measured in a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from math import ceil, inf
from statistics import median
from typing import NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.comm.waiting import MIN_SLEEP_S, number_of_tests, pause, sleeps
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.request import Request

LENGTH = 1 << 18
"""Bytes of the messages whose copies are measured."""

PARTS = 40
"""Parts of the computation between which a rank tests its message."""

COPIES = 9
"""Measurements of which the median is taken."""

LENGTHS = tuple(1 << k for k in range(12, 21))
"""Lengths of messages among which the longest eager one is found, in B."""

PAUSE = 4e-3
"""Time in which ranks make no calls, beside three times that of the message, in s."""


def measure_copy(comm: Communicator, network: Network) -> float:
    """Measure the processor's time for a byte that is sent or received, in s/B. Collective.

    Over sockets, the processors of both ranks copy the bytes, and the system's network code runs on
    them; network cards that copy by themselves need almost none of it.

    All ranks exchange an array with one on another host while they compute. The processor's time
    beyond that of the same with arrays of 64 B is that of the bytes.

    Parameters
    ----------
    comm : Communicator
        With ranks on several hosts.
    network : Network
        Of the job: the computation has to take longer than the message.
    """
    to, source = _partners(comm)
    x = np.ones((128, 128), "float32")  # fits into the cache
    y = np.empty_like(x)

    def compute(rounds: float, request: Request | None = None) -> float:
        begin = time.thread_time()
        for _ in range(PARTS):
            for _ in range(max(1, round(rounds))):
                np.matmul(x, x, out=y)
            if request is not None:
                request.test()
        return time.thread_time() - begin

    compute(1)
    rounds = 1.5 * 2 * _duration(comm, network, LENGTH) / compute(1)

    times: dict[int, list[float]] = {64: [], LENGTH: []}
    for _ in range(COPIES):
        for nbytes, found in times.items():
            sent, received = np.ones(nbytes, "uint8"), np.zeros(nbytes, "uint8")
            comm.barrier()
            begin = time.thread_time()
            request = comm.exchange([(sent, to)], [(received, source)])
            compute(rounds, request)
            found.append(time.thread_time() - begin)
            request.wait()
    short, long = map(median, times.values())
    return max(long - short, 0.0) / (2 * (LENGTH - 64))


def measure_eager(comm: Communicator, network: Network) -> float:
    """Find the longest message that arrives while its ranks make no calls, in B. Collective.

    The first rank sends to the first one of another host. Both sleep for several times as long as
    the message takes, so that one that has not arrived then is not eager.

    Parameters
    ----------
    comm : Communicator
        With ranks on several hosts.
    network : Network
        Of the job.

    Returns
    -------
    float
        Infinite if even the longest one of `LENGTHS` arrives.
    """
    peer = next(r for r in range(comm.size) if comm.hosts[r] != comm.hosts[0])
    longest = 0.0
    for nbytes in LENGTHS:
        alone = _duration(comm, network, nbytes)
        waited = median(_waited(comm, peer, nbytes, 3 * alone + PAUSE) for _ in range(3))
        if max(comm.gather_object(waited)) > 0.5 * alone + 1e-4:
            return max(longest, float(LENGTHS[0]))
        longest = nbytes
    return inf


def _waited(comm: Communicator, peer: int, nbytes: int, pause: float) -> float:
    """Return for how long the receiver of a message waits after a pause; 0 on other ranks."""
    array = np.zeros(nbytes, "uint8")
    comm.barrier()
    if comm.rank not in (0, peer):
        return 0.0
    request = comm.irecv(array, 0) if comm.rank == peer else comm.isend(array, peer)
    time.sleep(pause)
    begin = time.perf_counter()
    request.wait()
    return time.perf_counter() - begin if comm.rank == peer else 0.0


def _partners(comm: Communicator) -> tuple[int, int]:
    """Return the ranks on other hosts to which this one sends, and from which it receives."""
    shift = sum(host == comm.hosts[0] for host in comm.hosts)
    return (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size


def _duration(comm: Communicator, network: Network, nbytes: int) -> float:
    """Return about how long a message takes if all ranks of a host send at the same time, in s."""
    first = comm.hosts[0]
    peer = next(host for host in comm.hosts if host != first)
    route = network.routes[first, peer]
    ranks = sum(host == first for host in comm.hosts)
    capacity = min((network.links.get(link, inf) for link in route.links), default=inf)
    return route.latency + nbytes * max(1 / route.bandwidth, ranks / capacity)


SHORT_BYTES, LONG_BYTES = 64, 1 << 20
"""Lengths of the arrays whose times are measured, in B."""

REPEATS = 15
"""Repetitions of each measurement, after two that open connections; the median is used."""

CACHE = 4 << 20
"""Bytes that are written before each repetition: calls of a training step find cold caches."""


class Processor(NamedTuple):
    """What messages cost the processor of a rank.

    Attributes
    ----------
    call : float
        Time of each call that starts an operation, and of the wait for it, on a core of its own, in
        s.
    copy : float
        Time to copy a byte that is sent to another host or received from one, in s/B. Those inside
        a host are copied within the bandwidth of the network.
    add : float
        Time per byte of a library's allreduce inside a host, during which p ranks add and copy 1 -
        1 / p of the array, in s/B; 0: it takes the time of messages.
    eager : float
        Bytes up to which a message between hosts travels while its ranks compute; a longer one
        only proceeds when they are in calls of the communicator.
    wake : float or None
        Time by which a sleep is longer than it should be, in s, if ranks sleep while they wait
        (`pydtnn.comm.waiting`); None: they poll, and keep their part of a core.
    test : float
        Time of the processor for a sleep and the test after it, in s, if ranks sleep while they
        wait.
    """

    call: float = 0.0
    copy: float = 0.0
    add: float = 0.0
    eager: float = inf
    wake: float | None = None
    test: float = 0.0

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
        waits = messages.eager or inf, messages.wake, messages.test
        return cls(messages.call, copy, add, *waits)

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
            return (time.perf_counter() - begin) / beside

        def ring() -> float:
            """Those of a schedule; its waits take no time of the processor if ranks sleep."""
            begin = time.thread_time()
            scheduled.allreduce(elements)
            return (time.thread_time() - begin) / (2 * comm.size - 2)

        beside = ceil(host.size / (os.cpu_count() or 1))  # ranks of a core
        wake = comm.gather_object(_measure_wake())[0]
        scheduled, elements = create_allreduce("ring", comm), np.zeros(comm.size, "float32")
        exchanged = _measure(comm, exchange if wake is None else ring, cold)
        # gradients have just been computed, so they are in the cache of their rank
        sums = [_measure(host, partial(_add_up, host, array), array) for array in (short, long)]
        add = max(sums[1] - sums[0], 0.0) / (LONG_BYTES - SHORT_BYTES) if host.size > 1 else 0.0
        add /= beside * max(1 - 1 / host.size, 0.5)
        several = len({*comm.hosts}) > 1
        if several and network is None:
            network = Network.measure(comm)
        eager = measure_eager(comm, network) if several and network else inf
        host.free()
        test = 0.0 if wake is None else _measure_test(comm)
        copy = measure_copy(comm, network) if several and network else 0.0
        found = comm.gather_object((exchanged / 2, add, copy, test))
        call, add, copy, test = (median(values) for values in zip(*found, strict=True))
        return cls(call, copy, add, eager=eager, wake=wake, test=test)


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

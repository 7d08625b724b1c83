"""Measurement of the time of a rank's processor for messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import ceil, inf
from statistics import median

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.comm.waiting import MIN_SLEEP_S, sleeps
from pydtnn.tools.perfmodel.calibration.sample import sample
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.platform import Link
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


SHORT_BYTES, LONG_BYTES = 64, 1 << 20
"""Lengths of the arrays whose times are measured, in B."""

REPEATS = 15
"""Repetitions of each measurement; the median is used."""

CACHE = 4 << 20
"""Bytes that are written before each repetition: calls of a training step find cold caches."""


def measure_copy(comm: Communicator, link: Link) -> float:
    """Measure the processor's time for a byte that is sent or received, in s/B. Collective.

    Over sockets, the processors of both ranks copy the bytes, and the system's network code runs on
    them; network cards that copy by themselves need almost none of it.

    All ranks exchange an array with one on another host while they compute. The processor's time
    beyond that of the same with arrays of 64 B is that of the bytes.

    Parameters
    ----------
    comm : Communicator
        With ranks on several hosts.
    link : Link
        Between hosts: the computation has to take longer than the message.
    """
    shift = sum(host == comm.hosts[0] for host in comm.hosts)  # to another host
    to, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
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
    rounds = 1.5 * 2 * _duration(comm, link, LENGTH) / compute(1)

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


def measure_eager(comm: Communicator, link: Link) -> float:
    """Find the longest message that arrives while its ranks make no calls, in B. Collective.

    The first rank sends to the first one of another host. Both sleep for several times as long as
    the message takes, so that one that has not arrived then is not eager.

    Parameters
    ----------
    comm : Communicator
        With ranks on several hosts.
    link : Link
        Between hosts.

    Returns
    -------
    float
        Infinite if even the longest one of `LENGTHS` arrives.
    """
    peer = next(r for r in range(comm.size) if comm.hosts[r] != comm.hosts[0])
    for shorter, nbytes in pairwise((LENGTHS[0], *LENGTHS)):
        alone = _duration(comm, link, nbytes)
        waited = median(_waited(comm, peer, nbytes, 3 * alone + PAUSE) for _ in range(3))
        if max(comm.gather_object(waited)) > 0.5 * alone + 1e-4:
            return float(shorter)
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


def _duration(comm: Communicator, link: Link, nbytes: int) -> float:
    """Return about how long a message takes if all ranks of a host send at the same time, in s."""
    ranks = comm.hosts.count(comm.hosts[0])
    return link.latency + nbytes * max(1 / link.bandwidth, ranks / (link.shared or link.bandwidth))


def measure_processor(comm: Communicator, link: Link | None) -> Processor:
    """Measure the processor of the ranks of a job. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    link : Link or None
        Between hosts; None if there is one.

    Returns
    -------
    Processor
        Equal on all ranks.
    """
    if comm.size == 1:
        return Processor()
    host = comm.split_by_host()
    short, long = (np.zeros(n // 4, "float32") for n in (SHORT_BYTES, LONG_BYTES))
    received, cold = np.zeros_like(short), np.zeros(CACHE, "uint8")
    beside = ceil(host.size / (os.cpu_count() or 1))  # ranks of a core
    nap, clock = partial(time.sleep, MIN_SLEEP_S), time.perf_counter
    slept = median(sample("sleep", nap, REPEATS, clock=clock).times) if sleeps() else None
    wake = comm.gather_object(None if slept is None else max(slept - MIN_SLEEP_S, 0.0))[0]
    if wake is None:
        exchange = partial(exchange_around, comm, short, received)
        exchanged = _time(comm, exchange, cold, clock) / beside
    else:  # that of a schedule, whose waits take no time of the processor
        elements = np.zeros(comm.size, "float32")
        ring = partial(create_allreduce("ring", comm).allreduce, elements)
        exchanged = _time(comm, ring, cold, time.thread_time) / (2 * comm.size - 2)
    # gradients have just been computed, so they are in the cache of their rank
    sums = [_time(host, partial(_add_up, host, array), array, clock) for array in (short, long)]
    add = max(sums[1] - sums[0], 0.0) / (LONG_BYTES - SHORT_BYTES) if host.size > 1 else 0.0
    add /= beside * max(1 - 1 / host.size, 0.5)
    host.free()
    eager, copy = inf, 0.0
    if link is not None:
        eager, copy = measure_eager(comm, link), measure_copy(comm, link)
    test = 0.0 if wake is None else _measure_test(comm)
    found = comm.gather_object((exchanged / 2, add, copy, test))
    call, add, copy, test = (median(values) for values in zip(*found, strict=True))
    return Processor(call, copy, add, eager=eager, wake=wake, test=test)


def _time(
    comm: Communicator,
    operation: Callable[[], object],
    written: np.ndarray,
    clock: Callable[[], float],
) -> float:
    """Return the time of an operation of all ranks after writing an array, in s."""

    def together() -> None:
        written.fill(1)
        comm.barrier()

    return median(sample("messages", operation, REPEATS, together, clock).times)


def _add_up(comm: Communicator, array: np.ndarray) -> None:
    comm.iallreduce(array).wait()


def exchange_around(comm: Communicator, sent: np.ndarray, received: np.ndarray) -> None:
    """Send an array to the next rank, and receive one from the rank before. Collective."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.exchange([(sent, after)], [(received, before)]).wait()


def _measure_test(comm: Communicator) -> float:
    """Return the time of the processor for a sleep and a test of a message, in s."""
    array = np.zeros(1)
    request = comm.irecv(array, (comm.rank - 1) % comm.size)

    def nap() -> None:
        time.sleep(MIN_SLEEP_S)
        request.test()

    found = median(sample("test", nap, REPEATS, clock=time.thread_time).times)
    comm.barrier()
    comm.send(array.copy(), (comm.rank + 1) % comm.size)
    request.wait()
    return found

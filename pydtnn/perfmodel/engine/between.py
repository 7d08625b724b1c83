"""What messages between hosts cost the processors of their ranks, measured in a job.

Over sockets, the processors of both ranks copy the bytes, and the system's network code runs on
them; network cards that copy by themselves need almost none of it.
"""

from __future__ import annotations

import time
from math import inf
from statistics import median

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.network import Network
from pydtnn.utils.request import Request

LENGTH = 1 << 18
"""Bytes of the messages whose copies are measured."""

PARTS = 40
"""Parts of the computation between which a rank tests its message."""

REPEATS = 9
"""Measurements of which the median is taken."""

LENGTHS = tuple(1 << k for k in range(12, 21))
"""Lengths of messages among which the longest eager one is found, in B."""

PAUSE = 4e-3
"""Time in which ranks make no calls, beside three times that of the message, in s."""


def measure_copy(comm: Communicator, network: Network) -> float:
    """Measure the processor's time for a byte that is sent or received, in s/B. Collective.

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
    seconds = 1.5 * 2 * _duration(comm, network, LENGTH)
    work = _Work()
    rounds = work.rounds(seconds / PARTS)

    def compute(request: Request) -> None:
        for _ in range(PARTS):
            work.run(rounds)
            request.test()

    times: dict[int, list[float]] = {64: [], LENGTH: []}
    for _ in range(REPEATS):
        for nbytes, found in times.items():
            sent, received = np.ones(nbytes, "uint8"), np.zeros(nbytes, "uint8")
            comm.barrier()
            begin = time.thread_time()
            request = comm.exchange([(sent, to)], [(received, source)])
            compute(request)
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


class _Work:
    """Computation: products of matrices that fit into the cache."""

    def __init__(self) -> None:
        self._x = np.ones((128, 128), "float32")
        self._y = np.empty_like(self._x)
        self._seconds = 0.0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            np.matmul(self._x, self._x, out=self._y)

    def rounds(self, seconds: float) -> int:
        """Return how many products take so many seconds."""
        self.run(20)
        begin = time.thread_time()
        self.run(50)
        return max(1, round(50 * seconds / (time.thread_time() - begin)))

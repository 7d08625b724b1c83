"""Measurement of the message times between the ranks of a job, and of their addition speed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.utils import clock

LONG = 2**20
"""Size of the messages that measure bandwidth, in B."""

REPEATS = 5
"""Repetitions of each measurement, after one warm-up that opens connections; the median is used."""


class Probe:
    """Measurements on the ranks of a job.

    Collective: all ranks call the same methods in the same order, and receive equal results.

    Parameters
    ----------
    comm : Communicator
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.here = comm.hosts[comm.rank]
        self.ranks = {
            host: [rank for rank in range(comm.size) if comm.hosts[rank] == host]
            for host in dict.fromkeys(comm.hosts)
        }
        self.local = self.ranks[self.here]
        self.place = self.local.index(comm.rank)
        self.outgoing = np.ones(LONG, "uint8")
        self.incoming = np.ones(LONG, "uint8")

    def between(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return latency in s and bandwidth in B/s of a message, by pair of hosts.

        Disjoint pairs of hosts are measured concurrently, so many hosts need few turns.
        """
        own: dict[tuple[int, int], tuple[float, float]] = {}
        for pairs in turns(list(self.ranks)):
            self.comm.barrier()
            for one, other in pairs:
                own |= self._bounce(self.ranks[one][0], self.ranks[other][0])
        return self._merged(own)

    def inside(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Like `between`, for the first two ranks of each host with several ranks."""
        self.comm.barrier()
        return self._merged(self._bounce(*self.local[:2]) if len(self.local) > 1 else {})

    def cards(self) -> dict[int, float]:
        """Return B/s that a host sends and receives while all ranks write to the next host."""
        hosts = list(self.ranks)
        ranks = min(map(len, self.ranks.values()))
        if len(hosts) == 1:
            return {}
        mine = hosts.index(self.here)
        after, before = (self.ranks[hosts[(mine + by) % len(hosts)]] for by in (1, -1))

        def write() -> None:
            if self.place < ranks:
                self._pass_on(after[self.place], before[self.place])

        return self._merged({self.here: ranks * LONG / self._together(write)})

    def emulated(self) -> bool:
        """Return whether several hosts are one machine, whose processors they share."""
        machines = self.comm.gather_object((self.here, machine()))
        return len(dict.fromkeys(machines)) > len({name for _, name in machines})

    def memories(self) -> dict[int, float]:
        """Return B/s inside each host with several ranks while each rank writes to the next."""
        ranks = len(self.local)

        def write() -> None:
            if ranks > 1:
                self._pass_on(self.local[(self.place + 1) % ranks], self.local[self.place - 1])

        seconds = self._together(write)
        return self._merged({self.here: ranks * LONG / seconds} if ranks > 1 else {})

    def add(self) -> float:
        """Return the seconds to add a byte of float32 numbers while all ranks add."""
        x, y = self.outgoing.view("float32"), self.incoming.view("float32")
        return self._together(lambda: np.add(x, y, out=y)) / LONG

    def _bounce(self, first: int, second: int) -> dict[tuple[int, int], tuple[float, float]]:
        """Measure a ping-pong; return latency and bandwidth, on the rank `first` only."""
        taken = []
        for length in (1, LONG):
            outgoing, incoming = self.outgoing[:length], self.incoming[:length]
            times = []
            for _ in range(1 + REPEATS):
                start = clock.now()
                if self.comm.rank == first:
                    self.comm.send(outgoing, second)
                    self.comm.recv(incoming, second)
                elif self.comm.rank == second:
                    self.comm.recv(incoming, first)
                    self.comm.send(outgoing, first)
                times.append(clock.now() - start)
            taken.append(median(times[1:]) / 2)
        if self.comm.rank != first:
            return {}
        short, long = taken
        here, there = self.comm.hosts[first], self.comm.hosts[second]
        result = short, LONG / max(long - short, 1e-12)  # clocks may not resolve the difference
        return {(here, there): result, (there, here): result}

    def _pass_on(self, to: int, source: int) -> None:
        requests = [self.comm.irecv(self.incoming, source), self.comm.isend(self.outgoing, to)]
        for request in requests:
            request.wait()

    def _together(self, work: Callable[[], object]) -> float:
        """Return the seconds until all ranks have done their work after a simultaneous start."""
        times = []
        for _ in range(1 + REPEATS):
            self.comm.barrier()
            start = clock.now()
            work()
            times.append(clock.now() - start)
        return median(map(max, zip(*self.comm.gather_object(times[1:]), strict=True)))

    def _merged(self, own: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for one in self.comm.gather_object(own) for key, value in one.items()}


def machine() -> str:
    """Return a name of this machine that network namespaces and containers on it share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def turns(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pair each rank with every other once, in turns of disjoint pairs (circle method).

    >>> list(turns([0, 1, 2]))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[: len(circle) // 2 - 1 : -1], strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())

"""Cores that several ranks share.

Ranks that sleep while they wait for messages often wake up, and the system then chooses the core
with least work: those that compute have equal parts of all cores. Ranks that poll never leave
their cores: of three ranks on two, two share one, until the system lets them change places.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.validate import check_int

REBALANCE_S = 0.1
"""Time for which Linux leaves three processes on two cores where they are, in s: 0.1 to 0.15."""


@dataclass(frozen=True)
class SharedCores:
    """Which ranks share cores, and how many.

    Ranks that wait for messages leave their part to others if they sleep. Those that poll keep it:
    all ranks then always have the part of a core that they have while all compute.

    Attributes
    ----------
    number : int
        Cores of each group.
    groups : tuple of hashable
        Group of each rank, such as its host.
    kept : bool
        Whether ranks that wait keep their part.
    """

    number: int
    groups: tuple[Hashable, ...]
    kept: bool = False

    def __post_init__(self) -> None:
        check_int("SharedCores", "number", self.number, at_least=1)

    @classmethod
    def of(cls, platform: Platform, ranks: int, threads: int) -> SharedCores | None:
        """Return the cores that the ranks of a host share; None if there are enough for all."""
        cluster = platform.cluster
        if min(cluster.ranks_per_host, ranks) * threads <= cluster.cores_per_host:
            return None
        number, kept = max(cluster.cores_per_host // threads, 1), platform.messages.wake is None
        return cls(number, platform.hosts(ranks), kept)

    def end(self, rank: int, now: float, seconds: float) -> float:
        """Return when a rank ends that begins to compute, if ranks that wait keep their part."""
        group = self.groups[rank]
        ranks, place = self.groups.count(group), self.groups[:rank].count(group)
        fewest, more = divmod(ranks, self.number)  # ranks of a core, and cores with one more
        turn = int(now // REBALANCE_S)
        while True:
            beside = max(fewest + ((place + turn) % ranks < more * (fewest + 1)), 1)
            left = (turn + 1) * REBALANCE_S - now
            if not more or beside * seconds <= left:
                return now + beside * seconds
            now, seconds, turn = now + left, seconds - left / beside, turn + 1


class Cores:
    """The ranks that compute, each at the rate of its part of the cores.

    The ranks of a group compute at equal rates, so a group has one counter: the seconds of compute
    that each of its ranks has completed. A rank ends when the counter reaches its value at the
    start plus the seconds that the rank computes.

    Parameters
    ----------
    shared : SharedCores
    """

    def __init__(self, shared: SharedCores) -> None:
        self._number, self._groups = shared.number, shared.groups
        self._passed: dict[Hashable, float] = dict.fromkeys(shared.groups, 0.0)
        self._targets: dict[Hashable, list[tuple[float, int, int]]] = {g: [] for g in self._passed}
        self._now = 0.0

    def start(self, now: float, rank: int, seconds: float, job: int = 0) -> None:
        """Let a rank begin to compute what takes so many seconds on a core of its own.

        A rank may have several jobs at the same time, with different numbers.
        """
        self._advance(now)
        group = self._groups[rank]
        heapq.heappush(self._targets[group], (self._passed[group] + seconds, rank, job))

    def next_end(self) -> float:
        """Return the time when the next rank ends, if none starts; infinite if none computes."""
        return min(
            (
                self._now + max(targets[0][0] - self._passed[group], 0.0) / self._rate(group)
                for group, targets in self._targets.items()
                if targets
            ),
            default=inf,
        )

    def end(self, now: float) -> list[tuple[int, int]]:
        """Advance to a time, at most `next_end`; return ranks that have ended, and their jobs."""
        ended: list[tuple[int, int]] = []
        if self.next_end() > now:
            return ended
        self._advance(now)
        for group, targets in self._targets.items():
            slack = 1e-12 + 1e-15 * now
            while targets and targets[0][0] <= self._passed[group] + slack:
                ended.append(heapq.heappop(targets)[1:])
        return sorted(ended)

    def _rate(self, group: Hashable) -> float:
        return min(self._number / len(self._targets[group]), 1.0)

    def _advance(self, now: float) -> None:
        for group, targets in self._targets.items():
            if targets:
                self._passed[group] += self._rate(group) * (now - self._now)
        self._now = now

"""Cores that several ranks share.

Ranks that sleep while they wait for messages often wake up, and the system then chooses the core
with least work: those that compute have equal parts of all cores. Ranks that poll never leave
their cores: of three ranks on two, two share one, until the system lets them change places.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pydtnn.tools.perfmodel.network import Network, Route
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.validate import check_int

REBALANCE_S = 0.1
"""Time for which Linux leaves three processes on two cores where they are, in s: 0.1 to 0.15."""

SECOND = 1e12
"""Length of a second of compute where it is a message, to the picosecond."""


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

    @property
    def network(self) -> Network:
        """A link for each group, which all ranks that compute share; none is faster than a core."""
        groups = {*self.groups}
        routes = {(g, g): Route(0.0, SECOND, (str(g),)) for g in groups}
        return Network(self.groups, routes, {str(g): self.number * SECOND for g in groups})

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

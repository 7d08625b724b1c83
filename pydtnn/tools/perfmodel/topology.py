"""The switches between the hosts of a platform, and the way that messages take through them.

A topology is a class that returns the switches on the route between two hosts. Each neighbouring
pair of them is a link in this direction, which all messages on it share (`engine.flows`).
Hosts are numbered from 0 and fill the topology in this order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from pydtnn.tools.perfmodel.fields import count, counts, quantity

Switch = tuple[int, ...]
"""Identifies a switch of a topology."""


@dataclass(frozen=True, kw_only=True)
class Topology(ABC):
    """Switches between hosts.

    Attributes
    ----------
    hop : float
        Latency of each link between switches, in s.
    bandwidth : float or None
        Of each direction of a link between switches, in B/s; by default that of a message.
    switch : float or None
        Capacity of a switch for all messages that pass through it, in B/s; by default unlimited.
    """

    hop: float = quantity("s", default=0.0, positive=False)
    bandwidth: float | None = quantity("B/s", default=None)
    switch: float | None = quantity("B/s", default=None)

    @property
    @abstractmethod
    def hosts(self) -> int:
        """Number of hosts."""

    @abstractmethod
    def path(self, source: int, target: int) -> Sequence[Switch]:
        """Return the switches between two different hosts, in the order of the route."""

    def capacity(self, here: Switch, there: Switch) -> float | None:
        """Return the capacity of the link between two switches in B/s, None: `bandwidth`."""
        return self.bandwidth

    def route(self, source: int, target: int, bandwidth: float) -> tuple[float, dict[str, float]]:
        """Return what the route between two hosts has besides their network cards.

        Parameters
        ----------
        source, target : int
            Different hosts.
        bandwidth : float
            Of a message that is alone, in B/s: that of links unless they have one of their own.

        Returns
        -------
        float
            Latency in addition to that of two hosts at one switch, in s.
        dict of str to float
            Links by name, with their capacity in B/s.
        """
        path = self.path(source, target)
        links = {
            f"{_name(here)} to {_name(there)}": self.capacity(here, there) or bandwidth
            for here, there in pairwise(path)
        }
        latency = self.hop * len(links)
        if self.switch is not None:
            links |= {f"switch {_name(one)}": self.switch for one in path}
        return latency, links


def _name(switch: Switch) -> str:
    return ".".join(map(str, switch))


@dataclass(frozen=True, kw_only=True)
class FatTree(Topology):
    """Levels of switches; a switch has several switches above it.

    The route ascends to the nearest common level. The switches on the way up are selected by the
    number of the target, which is what InfiniBand's routing does for fat trees.

    Attributes
    ----------
    down : tuple of int
        Hosts, or switches, below a switch of each level, from the bottom.
    up : tuple of int
        Switches above a switch of each level but the last: with fewer than there are below, the
        tree is oversubscribed, 16 below and 4 above 4 : 1.

    References
    ----------
    Zahavi, D-Mod-K routing providing non-blocking traffic for shift permutations on real life fat
    trees, 2010; Petrini, Vanneschi, k-ary n-trees, 1997.
    """

    down: tuple[int, ...] = counts()
    up: tuple[int, ...] = counts(default=())

    def __post_init__(self) -> None:
        """Check the number of levels."""
        if len(self.up) != len(self.down) - 1:
            raise ValueError(
                f"up: expected {len(self.down) - 1} numbers, one for each level but the last, got "
                f"{len(self.up)}; correct it"
            )

    @property
    def hosts(self) -> int:
        return prod(self.down)

    def path(self, source: int, target: int) -> Sequence[Switch]:
        upwards: list[Switch] = []
        downwards: list[Switch] = []
        chosen: Switch = ()
        below = spread = 1
        for level, down in enumerate(self.down):
            below *= down
            if level:
                chosen = (*chosen, target // spread % self.up[level - 1])
                spread *= self.up[level - 1]
            upwards.append((level, source // below, *chosen))
            downwards.append((level, target // below, *chosen))
            if source // below == target // below:
                break
        return (*upwards, *downwards[-2::-1])


@dataclass(frozen=True, kw_only=True)
class Dragonfly(Topology):
    """Groups of routers: every two routers of a group, and every two groups, have a link.

    The route is the shortest one. Router j of group i has the link to group j, modulo the routers
    of a group.

    Attributes
    ----------
    groups : int
    routers : int
        Of a group.
    per_router : int
        Hosts of a router.
    between_groups : float or None
        Bandwidth of each direction of a link between groups, in B/s; by default that of others.

    References
    ----------
    Kim, Dally, Scott, Abts, Technology-driven, highly-scalable dragonfly topology, 2008.
    """

    groups: int = count()
    routers: int = count()
    per_router: int = count()
    between_groups: float | None = quantity("B/s", default=None)

    @property
    def hosts(self) -> int:
        return self.groups * self.routers * self.per_router

    def path(self, source: int, target: int) -> Sequence[Switch]:
        here, there = (divmod(host // self.per_router, self.routers) for host in (source, target))
        path = [here, there]
        if here[0] != there[0]:
            leaves = here[0], there[0] % self.routers
            enters = there[0], here[0] % self.routers
            path = [here, leaves, enters, there]
        return [*dict.fromkeys(path)]

    def capacity(self, here: Switch, there: Switch) -> float | None:
        return self.bandwidth if here[0] == there[0] else self.between_groups or self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Torus(Topology):
    """A grid of routers with links around, each with one host.

    The route follows one dimension after the other, each in the shorter direction, upwards if both
    are equal.

    Attributes
    ----------
    dimensions : tuple of int
        Consecutive hosts are neighbours along the first.
    """

    dimensions: tuple[int, ...] = counts()

    @property
    def hosts(self) -> int:
        return prod(self.dimensions)

    def path(self, source: int, target: int) -> Sequence[Switch]:
        here, there = self._place(source), self._place(target)
        path = [tuple(here)]
        for k, size in enumerate(self.dimensions):
            distance = (there[k] - here[k]) % size
            by = 1 if 2 * distance <= size else -1
            while here[k] != there[k]:
                here[k] = (here[k] + by) % size
                path.append(tuple(here))
        return path

    def _place(self, host: int) -> list[int]:
        return [int(i) for i in np.unravel_index(host, self.dimensions, "F")]


TOPOLOGIES = {"fat_tree": FatTree, "dragonfly": Dragonfly, "torus": Torus}
"""Topologies by their entry in a platform file."""

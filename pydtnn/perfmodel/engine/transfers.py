"""Messages in transit, which share links; rates are recomputed where something changes.

The messages of one route have the same rate, so each route has one counter of bytes, as in
`pydtnn.comm.schedules.cost`. When a message starts or ends, only the routes that are connected to
its route by shared links obtain new rates, so the work does not grow with the number of hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from math import inf

from pydtnn.comm.schedules.cost import fair_rates
from pydtnn.comm.schedules.network import Network, Pair

ROUNDING = 0.5
"""Bytes by which a message may be incomplete when it ends."""

MOST_KNOWN = 10_000
"""Divisions of links that are kept for repeated use."""


class _Route:
    """The messages on one route: bytes that have passed on each, and the values that end them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.passed, self.since, self.rate = 0.0, 0.0, 0.0
        self.targets: list[tuple[float, int, Hashable]] = []
        self.version = 0

    def advance(self, now: float) -> None:
        self.passed += self.rate * (now - self.since)
        self.since = now


class Transfers:
    """The messages in transit on a network.

    Parameters
    ----------
    network : Network
        Its links may change their capacity: see `limit`.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._routes: dict[Pair, _Route] = {}
        self._users: dict[str, dict[Pair, None]] = {}
        self._changed: dict[Pair, None] = {}
        self._ends: list[tuple[float, int, int, Pair]] = []
        self._count = 0
        self._known: dict[tuple[tuple[Pair, int], ...], dict[Pair, float]] = {}
        self._now = 0.0

    def start(self, now: float, pair: Pair, nbytes: float, name: Hashable) -> None:
        """Start a message."""
        route = self._routes.get(pair)
        if route is None:
            route = self._routes[pair] = _Route(len(self._routes))
        if not route.targets:
            route.passed, route.since, route.rate = 0.0, now, 0.0
            for link in self.network.routes[pair].links:
                self._users.setdefault(link, {})[pair] = None
        else:
            route.advance(now)
        self._count += 1
        heapq.heappush(route.targets, (route.passed + nbytes, self._count, name))
        self._changed[pair] = None
        self._now = now

    def next_end(self) -> float:
        """Return the time when the next message ends, if none starts; infinite without messages."""
        self._share()
        while self._ends:
            time, _, version, pair = self._ends[0]
            if self._routes[pair].version == version:
                return max(time, self._now)
            heapq.heappop(self._ends)
        return inf

    def end(self, now: float) -> list[Hashable]:
        """Advance to a time, at most `next_end`, and return the messages that have ended."""
        ended: list[Hashable] = []
        while self.next_end() <= now:
            pair = heapq.heappop(self._ends)[3]
            route = self._routes[pair]
            route.advance(now)
            slack = ROUNDING + 1e-15 * route.rate * now
            while route.targets and route.targets[0][0] <= route.passed + slack:
                ended.append(heapq.heappop(route.targets)[2])
            if not route.targets:
                for link in self.network.routes[pair].links:
                    del self._users[link][pair]
            self._changed[pair] = None
            self._now = now
        return ended

    def change(self, now: float, network: Network) -> None:
        """Replace the network by one with the same routes and other rates."""
        self.network, self._now = network, now
        self._known.clear()
        self._changed.update({pair: None for pair, route in self._routes.items() if route.targets})

    def _share(self) -> None:
        """Divide links among messages wherever messages have started or ended."""
        changed, self._changed = self._changed, {}
        done: set[Pair] = set()
        for pair in changed:
            if pair not in done:
                component = list(self._connected(pair))
                done.update(component)
                self._divide([one for one in component if self._routes[one].targets])
                for one in component:
                    self._schedule(one)

    def _connected(self, pair: Pair) -> Iterator[Pair]:
        """Yield a route and all routes that share links with it, directly or through others."""
        found, queue = {pair}, [pair]
        for one in queue:
            yield one
            for link in self.network.routes[one].links:
                for other in self._users.get(link, ()):
                    if other not in found:
                        found.add(other)
                        queue.append(other)

    def _divide(self, pairs: list[Pair]) -> None:
        pairs.sort(key=lambda pair: self._routes[pair].number)
        key = tuple((pair, len(self._routes[pair].targets)) for pair in pairs)
        rates = self._known.get(key)
        if rates is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            rates = self._known[key] = fair_rates(self.network, dict(key))
        for pair in pairs:
            route = self._routes[pair]
            route.advance(self._now)
            route.rate = rates[pair]

    def _schedule(self, pair: Pair) -> None:
        route = self._routes[pair]
        route.version += 1
        if route.targets:
            left = max(route.targets[0][0] - route.passed, 0.0)
            entry = (route.since + left / route.rate, route.number, route.version, pair)
            heapq.heappush(self._ends, entry)

"""Messages in transit, which share links; rates are recomputed where something changes.

The messages of one route have the same rate, so each route has one counter of bytes: those that
have passed, on each of its messages, since the beginning. A message ends when the counter reaches
its value at the start of the message plus the length of the message. When a message starts or ends,
only the routes that are connected to its route by shared links obtain new rates, so the work does
not grow with the number of hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import inf
from typing import Any

from pydtnn.tools.perfmodel.network import Network, Pair

ROUNDING = 0.5
"""Bytes by which a message may be incomplete when it ends."""

MAX_KNOWN_RATES = 300_000
"""About as many rates of messages are kept for repeated use."""


def fair_rates(network: Network, messages: Mapping[Pair, int]) -> dict[Pair, float]:
    """Divide links among messages: each rate is raised until a link of its route is saturated.

    No message can be faster without slowing down another one that is at most as fast (max-min
    fairness), which TCP approximates on equal routes, and networks with credits or fair queues on
    all.

    Parameters
    ----------
    network : Network
    messages : mapping of (host, host) to int
        Number of messages in transit on each route.

    Returns
    -------
    dict of (host, host) to float
        Rate of each message on a route, in B/s.

    References
    ----------
    Bertsekas, Gallager, Data networks, 2nd edition 1992, section 6.5.2.
    """
    left: dict[str, float] = {}
    users: dict[str, int] = {}
    routes_of: dict[str, list[Pair]] = {}
    limits: list[tuple[float, int, str | Pair]] = []  # a heap; links have lower bounds in it
    for pair, n in messages.items():
        route = network.routes[pair]
        limits.append((route.bandwidth, len(limits), pair))
        for link in route.links:
            users[link] = users.get(link, 0) + n
            routes_of.setdefault(link, []).append(pair)
    for link, n in users.items():
        left[link] = network.links[link]
        limits.append((left[link] / n, len(limits), link))
    heapq.heapify(limits)
    rates: dict[Pair, float] = {}
    while len(rates) < len(messages):
        limit, number, what = limits[0]
        pairs: list[Pair] = []
        if isinstance(what, tuple):
            pairs = [what]
        elif users[what]:
            share = left[what] / users[what]
            if share > limit * (1 + 1e-9):  # other routes have left a larger share
                heapq.heapreplace(limits, (share, number, what))
                continue
            pairs = routes_of[what]
        heapq.heappop(limits)
        for pair in pairs:
            if pair not in rates:
                rates[pair] = limit
                n = messages[pair]
                for link in network.routes[pair].links:
                    left[link] -= limit * n
                    users[link] -= n
    return rates


class _Route:
    """The messages on one route: bytes that have passed on each, and the values that end them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.passed, self.since, self.rate = 0.0, 0.0, 0.0
        self.targets: list[tuple[float, int, Any]] = []
        self.version = 0

    def advance(self, now: float) -> None:
        self.passed += self.rate * (now - self.since)
        self.since = now


class Flows:
    """The messages in transit on a network.

    Parameters
    ----------
    network : Network
        Its links may change their capacity: see `change`.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._routes: dict[Pair, _Route] = {}
        self._users: dict[str, dict[Pair, None]] = {}
        self._changed: dict[Pair, None] = {}
        self._ends: list[tuple[float, int, int, Pair]] = []
        self._count = 0
        kept = lru_cache(MAX_KNOWN_RATES // (1 + len(network.hosts)) + 1)
        self._rates = kept(lambda messages: fair_rates(network, dict(messages)))
        self._now = 0.0

    def start(self, now: float, pair: Pair, nbytes: float, name: Any) -> None:
        """Start a message."""
        route = self._routes.setdefault(pair, _Route(len(self._routes)))
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

    def end(self, now: float) -> list[Any]:
        """Advance to a time, at most `next_end`, and return the messages that have ended."""
        self._share()
        ended: list[Any] = []
        while self._ends:
            time, _, version, pair = self._ends[0]
            route = self._routes[pair]
            if route.version == version:
                if (time - now) * route.rate > ROUNDING:
                    break
                route.advance(now)
                slack = ROUNDING + 1e-15 * route.rate * now
                while route.targets and route.targets[0][0] <= route.passed + slack:
                    ended.append(heapq.heappop(route.targets)[2])
                if not route.targets:
                    for link in self.network.routes[pair].links:
                        del self._users[link][pair]
                self._changed[pair] = None
            heapq.heappop(self._ends)
        self._now = now
        return ended

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
        links: set[str] = set()
        found, queue = {pair}, [pair]
        for one in queue:
            yield one
            for link in self.network.routes[one].links:
                if link not in links:
                    links.add(link)
                    new = [other for other in self._users.get(link, ()) if other not in found]
                    found.update(new)
                    queue += new

    def _divide(self, pairs: list[Pair]) -> None:
        pairs.sort(key=lambda pair: self._routes[pair].number)
        key = tuple((pair, len(self._routes[pair].targets)) for pair in pairs)
        rates = self._rates(key)
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

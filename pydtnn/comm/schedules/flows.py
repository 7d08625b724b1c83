"""Messages that share links, as flows whose rates change when other messages start or end."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import inf

from pydtnn.comm.schedules.network import Network, Pair

Name = tuple[int, int]
"""Identifies a message in transit: its number in the schedule, and its chunk."""


class Flows:
    """The messages in transit.

    All messages on one route have the same rate, so each route needs only one counter: the number
    of bytes that have passed, on each of its messages, since the beginning. A message ends when the
    counter reaches its value at the start of the message plus the length of the message.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.now = 0.0
        self.passed: dict[Pair, float] = defaultdict(float)
        self.targets: dict[Pair, list[tuple[float, Name]]] = defaultdict(list)
        self.rates: dict[Pair, float] = {}
        self.known: dict[frozenset[tuple[Pair, int]], dict[Pair, float]] = {}

    def start(self, starting: Iterable[tuple[Pair, Name, float]]) -> None:
        """Start messages, each given by its route, its name and its bytes."""
        for pair, name, nbytes in starting:
            heapq.heappush(self.targets[pair], (self.passed[pair] + nbytes, name))
        self._share()

    def next_end(self) -> float:
        """Return the time when the next message ends, if no other starts."""
        ends = (
            (self.targets[pair][0][0] - self.passed[pair]) / rate
            for pair, rate in self.rates.items()
        )
        return self.now + max(min(ends, default=inf), 0.0)

    def advance(self, now: float) -> list[Name]:
        """Advance the time and return the messages that have ended."""
        ended = []
        for pair, rate in self.rates.items():
            self.passed[pair] += rate * (now - self.now)
            targets = self.targets[pair]
            while targets and targets[0][0] <= self.passed[pair] + 0.5:  # B, for rounding errors
                ended.append(heapq.heappop(targets)[1])
        self.now = now
        if ended:
            self._share()
        return ended

    def _share(self) -> None:
        counts = {pair: len(targets) for pair, targets in self.targets.items() if targets}
        key = frozenset(counts.items())
        if key not in self.known:
            self.known[key] = fair_rates(self.network, counts)
        self.rates = self.known[key]


def fair_rates(network: Network, messages: Mapping[Pair, int]) -> dict[Pair, float]:
    """Divide links among messages: each rate is raised until a link of its route is saturated.

    No message can be faster without slowing down another one that is at most as fast (max-min
    fairness), which TCP approximates on equal routes.

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
    left = dict(network.links)
    users: Counter[str] = Counter()
    for pair, n in messages.items():
        users.update(dict.fromkeys(network.routes[pair].links, n))
    rates: dict[Pair, float] = {}
    growing = list(messages)
    while growing:
        limits = {}
        for pair in growing:
            route = network.routes[pair]
            shares = [left[link] / users[link] for link in route.links]
            limits[pair] = min([route.bandwidth, *shares])
        rate = min(limits.values())
        full = [pair for pair in growing if limits[pair] <= rate * (1 + 1e-9)]
        for pair in full:
            rates[pair] = rate
            for link in network.routes[pair].links:
                left[link] -= rate * messages[pair]
                users[link] -= messages[pair]
        growing = [pair for pair in growing if pair not in rates]
    return rates

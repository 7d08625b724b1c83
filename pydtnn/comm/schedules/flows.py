"""Messages that share links, as flows: each passes at a rate that changes as others come and go."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import inf

from pydtnn.comm.schedules.network import Network, Pair

Name = tuple[int, int]
"""Names a message that flows: its number in the schedule, and its chunk."""


class Flows:
    """The messages whose bytes are passing.

    All messages on one route have the same rate, so each route needs only one count: how many bytes
    have passed, on each of its messages, since the beginning. A message ends when the count reaches
    what it was at its start plus its length.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.now = 0.0
        self.passed: dict[Pair, float] = defaultdict(float)
        self.targets: dict[Pair, list[tuple[float, Name]]] = defaultdict(list)
        self.rates: dict[Pair, float] = {}
        self.known: dict[frozenset[tuple[Pair, int]], dict[Pair, float]] = {}

    def start(self, starting: Iterable[tuple[Pair, Name, float]]) -> None:
        """Let messages flow, each given by its route, its name and its bytes."""
        for pair, name, nbytes in starting:
            heapq.heappush(self.targets[pair], (self.passed[pair] + nbytes, name))
        self._share()

    def next_end(self) -> float:
        """When the next message ends, if no other starts."""
        ends = (
            (self.targets[pair][0][0] - self.passed[pair]) / rate
            for pair, rate in self.rates.items()
        )
        return self.now + max(min(ends, default=inf), 0.0)

    def advance(self, now: float) -> list[Name]:
        """Let time pass and return the messages that have ended."""
        ended = []
        for pair, rate in self.rates.items():
            self.passed[pair] += rate * (now - self.now)
            targets = self.targets[pair]
            while targets and targets[0][0] <= self.passed[pair] + 0.5:  # B, against rounding
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
    """Divide the links among messages: the rate of each is raised until a link of its is full.

    No message could go faster without one that is no faster going slower (max-min fairness), which
    is what TCP strives for on equal routes.

    Parameters
    ----------
    network : Network
    messages : mapping of (host, host) to int
        How many messages are under way on each route.

    Returns
    -------
    dict of (host, host) to float
        B/s of each message on a route.

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

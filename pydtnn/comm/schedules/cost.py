"""Predicted time of a schedule on a network: the rounds of all ranks, simulated as flows on links.

The simulation is event-driven. A message starts when both ranks have reached it; after the latency
of its route its bytes flow, at a rate that changes whenever another message starts or ends. A
rank's round ends when its messages have ended and it has added the received values. As in the
executor, ranks cut long arrays into chunks, each of which passes through the rounds by itself, and
process as many of them concurrently as the executor would (`chunks`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import inf

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.executor import CHUNK_BYTES, chunks_in_flight, pieces
from pydtnn.comm.schedules.network import Network, Pair
from pydtnn.comm.schedules.timeline import timeline

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


def cost(
    algorithm: str | Algorithm,
    nbytes: int,
    network: Network,
    chunk_bytes: int = CHUNK_BYTES,
    active: int | None = None,
) -> float:
    """Predict the time that an allreduce takes, in s.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `SCHEDULES`, or a user-defined generator function.
    nbytes : int
        Size of the array, in B.
    network : Network
        Network with the hosts of all ranks.
    chunk_bytes : int
        Length of the chunks that long arrays are cut into, in B.
    active : int, optional
        Chunks of the array in progress at the same time; by default `chunks_in_flight`.

    Returns
    -------
    float
        Time from the simultaneous start of all ranks to the end of the last one, in s.

    Raises
    ------
    ScheduleError
        If a send or a receive has no match, or ranks deadlock.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005,
    section 3: latency, bandwidth and time to add, for messages that do not share links.

    Examples
    --------
    >>> network = Network.create("abcd", latency=1e-4, bandwidth=1e8)
    >>> round(cost("ring", 4_000_000, network), 6)  # 2 (P-1) (1e-4 + 1e6 / 1e8)
    0.0606
    """
    active = active or chunks_in_flight(network.hosts)
    return _Replay(algorithm, nbytes, network, pieces(nbytes, chunk_bytes), active).run()


Journey = tuple[int, int]
"""A rank and one of its chunks."""


class _Replay:
    """State of the simulation: the current round of each chunk on each rank."""

    def __init__(
        self, algorithm: str | Algorithm, nbytes: int, network: Network, chunks: int, active: int
    ) -> None:
        hosts = network.hosts
        plan = [rounds(algorithm, rank, hosts) for rank in range(len(hosts))]
        self.network = network
        self.messages = timeline(plan).messages
        whole = nbytes / chunks
        self.nbytes = [whole * float(m.part.stop - m.part.start) for m in self.messages]
        self.routes = [(hosts[m.sender], hosts[m.receiver]) for m in self.messages]
        self.talk: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, message in enumerate(self.messages):
            self.talk[message.sender, message.sent].append(index)
            self.talk[message.receiver, message.received].append(index)
        self.rounds = [len(steps) for steps in plan]
        self.chunks = chunks
        self.active = active
        self.started = [0] * len(hosts)  # number of chunks started by each rank
        self.round: dict[Journey, int] = {}
        self.open: dict[Journey, int] = {}  # number of incomplete messages of a round
        self.to_add: dict[Journey, float] = defaultdict(float)  # bytes received in a round
        self.come: Counter[tuple[int, int]] = Counter()  # number of ranks that reached a message
        self.free = [0.0] * len(hosts)  # time at which a rank completes its pending additions
        self.starts: list[tuple[float, int, int]] = []  # time, message, chunk
        self.ready: list[tuple[float, int, int]] = []  # time, rank, chunk

    def run(self) -> float:
        """Return the time when the last rank has ended its last round."""
        flows = Flows(self.network)
        now = 0.0
        for rank in range(len(self.rounds)) if self.messages else ():
            for _ in range(self.active):
                self._start(rank, now)
        while self.starts or self.ready or flows.rates:
            queued = [queue[0][0] for queue in (self.starts, self.ready) if queue]
            now = min([flows.next_end(), *queued])
            for index, chunk in flows.advance(now):
                self._end(index, chunk, now)
            while self.ready and self.ready[0][0] <= now:
                _, rank, chunk = heapq.heappop(self.ready)
                self._next_round(rank, chunk, now)
            starting = []
            while self.starts and self.starts[0][0] <= now:
                _, index, chunk = heapq.heappop(self.starts)
                starting.append((self.routes[index], (index, chunk), self.nbytes[index]))
            if starting:
                flows.start(starting)
        return now

    def _start(self, rank: int, now: float) -> None:
        """Start the next chunk of a rank, if there is one."""
        chunk = self.started[rank]
        if chunk < self.chunks:
            self.started[rank] += 1
            self.round[rank, chunk] = -1
            self._next_round(rank, chunk, now)

    def _next_round(self, rank: int, chunk: int, now: float) -> None:
        """Start the next round that is not empty, or else the next chunk."""
        journey = rank, chunk
        talk: list[int] = []
        while not talk:
            self.round[journey] += 1
            if self.round[journey] >= self.rounds[rank]:
                self._start(rank, now)
                return
            talk = self.talk[rank, self.round[journey]]
        self.open[journey] = len(talk)
        for index in talk:
            self.come[index, chunk] += 1
            if self.come[index, chunk] == 2:
                latency = self.network.routes[self.routes[index]].latency
                heapq.heappush(self.starts, (now + latency, index, chunk))

    def _end(self, index: int, chunk: int, now: float) -> None:
        """End a message; a rank whose round has no more open messages adds the received values."""
        message = self.messages[index]
        if message.op == "sum":
            self.to_add[message.receiver, chunk] += self.nbytes[index]
        for rank in (message.sender, message.receiver):
            journey = rank, chunk
            self.open[journey] -= 1
            if not self.open[journey]:
                work = self.to_add.pop(journey, 0.0) * self.network.add
                if work:
                    self.free[rank] = max(self.free[rank], now) + work
                heapq.heappush(self.ready, (self.free[rank] if work else now, rank, chunk))

"""The network between ranks: latency and bandwidth of every pair of hosts, and shared links.

A `Network` is specified by numbers or measured on the ranks of a job; virtual ranks send messages
on it.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.tools.perfmodel.topology import Topology
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
        for pairs in round_robin(list(self.ranks)):
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

        ends = (after[self.place], before[self.place]) if self.place < ranks else None
        return self._merged({self.here: self._rate(ranks, ends)})

    def emulated(self) -> bool:
        """Return whether several hosts are one machine, whose processors they share."""
        machines = self.comm.gather_object((self.here, machine()))
        return len(dict.fromkeys(machines)) > len({name for _, name in machines})

    def memories(self) -> dict[int, float]:
        """Return B/s inside each host with several ranks while each rank writes to the next."""
        ranks = len(self.local)
        ends = self.local[(self.place + 1) % ranks], self.local[self.place - 1]
        rate = self._rate(ranks, ends if ranks > 1 else None)
        return self._merged({self.here: rate} if ranks > 1 else {})

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

    def _rate(self, ranks: int, ends: tuple[int, int] | None) -> float:
        """Return B/s of so many ranks that write at the same time: this one to and from `ends`."""

        def write() -> None:
            if ends is not None:
                comm, (to, source) = self.comm, ends
                for one in [comm.irecv(self.incoming, source), comm.isend(self.outgoing, to)]:
                    one.wait()

        return ranks * LONG / self._together(write)

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


def round_robin(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pair each rank with every other once, in turns of disjoint pairs (circle method).

    >>> list(round_robin([0, 1, 2]))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[: len(circle) // 2 - 1 : -1], strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())


Pair = tuple[Hashable, Hashable]
"""The sending and the receiving host; where hosts have several cards, each with the number of the
card. Equal for messages inside a host."""


class Route(NamedTuple):
    """The route of a message from one host to another, or to a rank of the same host.

    Attributes
    ----------
    latency : float
        Time of an empty message, in s.
    bandwidth : float
        Bandwidth of a message that is alone on the route, in B/s.
    links : tuple of str
        Names of the links that it crosses and shares with other messages.
    """

    latency: float
    bandwidth: float
    links: tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """Ranks on hosts, the routes between the hosts, and the links that routes share.

    A message of n bytes that shares no link with another takes ``latency + n / bandwidth``;
    concurrent messages divide the capacity of each link that they share. Adding n received bytes
    takes ``n * add``.

    Parameters
    ----------
    hosts : tuple of hashable
        The host of every rank.
    routes : mapping of (host, host) to Route
        For every ordered pair of hosts, and for every host with several ranks to itself.
    links : mapping of str to float
        Capacity of the shared links, in B/s.
    add : float, default 0
        Time to add a byte, in s/B.
    cards : tuple of int, optional
        The network card that every rank sends on, where hosts have several: routes between hosts
        are those between pairs (host, card). By default hosts have one, and routes are those
        between hosts.

    References
    ----------
    Alexandrov, Ionescu, Schauser, Scheiman, LogGP: incorporating long messages into the LogP model,
    1995: a latency and a time per byte. Its processor overhead is part of the latency here.
    """

    hosts: tuple[Hashable, ...]
    routes: Mapping[Pair, Route]
    links: Mapping[str, float]
    add: float = 0.0
    cards: tuple[int, ...] = ()

    def pair(self, sender: int, receiver: int) -> Pair:
        """Return the key of the route from one rank to another."""
        here, there = self.hosts[sender], self.hosts[receiver]
        if not self.cards or here == there:
            return here, there
        card = self.cards[sender]
        return (here, card), (there, card)

    def route(self, sender: int, receiver: int) -> Route:
        """Return the route from one rank to another."""
        return self.routes[self.pair(sender, receiver)]

    def repeated(self, ranks: int) -> Network:
        """Return the network of ranks that repeat after so many, two of each kind of which send.

        What they send to other hosts arrives on the links of those that take their place.

        Raises
        ------
        ValueError
            If hosts are not numbers that repeat, or there are links between switches.
        """
        hosts: Any = self.hosts
        number, routes = hosts[ranks], self.routes
        same = all(b - a == number for a, b in zip(hosts, hosts[ranks:], strict=False))
        if not isinstance(routes, _AlikeRoutes) or routes.topology or not (number and same):
            raise ValueError("Network: expected whole equal hosts on a switch for ranks of a kind")
        routes = replace(routes, period=number)
        return replace(self, routes=routes, links=routes.links)

    def __post_init__(self) -> None:
        routes = self.routes
        for sender, receiver in routes.examples() if isinstance(routes, _AlikeRoutes) else routes:
            route = routes[sender, receiver]
            who = f"Network: the route from host {sender} to {receiver}"
            if route.bandwidth <= 0 or route.latency < 0:
                raise ValueError(
                    f"{who} must have a bandwidth above 0 and a latency of at least 0, got "
                    f"{route.bandwidth} B/s and {route.latency} s."
                )
            for link in route.links:
                if self.links.get(link, 0.0) <= 0:
                    raise ValueError(
                        f"{who} uses the link {link!r}: `links` must contain its capacity, above "
                        "0 B/s."
                    )

    @classmethod
    def create(
        cls,
        hosts: Sequence[Hashable],
        *,
        latency: float,
        bandwidth: float,
        local_latency: float | None = None,
        local_bandwidth: float | None = None,
        card: float | None = None,
        memory: float | None = None,
        add: float = 0.0,
        topology: Topology | None = None,
        rails: int = 1,
    ) -> Network:
        """Create a network of identical hosts, by default on a switch that is never the bottleneck.

        Each host has a network card, which its ranks share and which is full duplex, or several.

        Parameters
        ----------
        hosts : sequence of hashable
            The host of every rank.
        latency, bandwidth : float
            Between hosts, in s and B/s.
        local_latency, local_bandwidth : float, optional
            Inside a host; by default as between hosts.
        card : float, optional
            Capacity of each direction of a network card, in B/s; by default `bandwidth`.
        memory : float, optional
            Capacity of a host's memory, which messages inside it share, in B/s; by default they
            share nothing.
        add : float, default 0
            Time to add a byte, in s/B.
        topology : Topology, optional
            The links between the switches; hosts are numbers then.
        rails : int, default 1
            Cards of a host. Each is on a network of its own, and belongs to every `rails`-th rank
            of the host; the sender of a message determines the network.

        Examples
        --------
        >>> network = Network.create("aab", latency=5e-5, bandwidth=1.25e8)
        >>> network.routes["a", "b"]
        Route(latency=5e-05, bandwidth=125000000.0, links=('from a', 'to b'))
        """
        inside = Route(
            latency if local_latency is None else local_latency,
            bandwidth if local_bandwidth is None else local_bandwidth,
            (),
        )
        card = bandwidth if card is None else card
        between = Route(latency, bandwidth, ())
        every = dict.fromkeys(hosts)
        routes = _AlikeRoutes(every, inside, between, card, memory, topology, rails)
        place = defaultdict[Hashable, Iterator[int]](count)
        cards = tuple(next(place[host]) % rails for host in hosts) if rails > 1 else ()
        return cls(tuple(hosts), routes, routes.links, add, cards)

    @classmethod
    def measure(cls, comm: Communicator) -> Network:
        """Measure the network between the ranks of a job. Collective: all ranks call it.

        Latency and bandwidth of a pair of hosts are those of a ping-pong between the first ranks
        of both; inside a host, between its first two. The capacity of a network card is measured
        with all ranks of all hosts sending and receiving at once; so are that of a host's memory
        and the time to add. Emulated hosts share the processors of a machine, which may not be able
        to fill all links at once: a card of theirs has at least the bandwidth of a pair of hosts.

        Parameters
        ----------
        comm : Communicator

        Returns
        -------
        Network
            Equal on all ranks.
        """
        probe = Probe(comm)
        between, cards = probe.between(), probe.cards()
        if probe.emulated():
            for (host, _), (_, bandwidth) in between.items():
                cards[host] = max(cards[host], bandwidth)
        routes: dict[Pair, Route] = {
            (here, there): Route(*found, (_card(here)[0], _card(there)[1]))
            for (here, there), found in between.items()
        }
        links = {link: rate for host, rate in cards.items() for link in _card(host)}
        routes |= {
            pair: Route(*found, (_memory(pair[0]),)) for pair, found in probe.inside().items()
        }
        links |= {_memory(host): rate for host, rate in probe.memories().items()}
        return cls(comm.hosts, routes, links, probe.add())


@dataclass(eq=False)
class _AlikeRoutes(Mapping[Pair, Route]):
    """The routes between equal hosts; they and their links are computed when they are needed."""

    hosts: Mapping[Hashable, None]
    inside: Route
    between: Route
    card: float
    memory: float | None
    topology: Topology | None
    rails: int
    period: int = 0  # hosts after which they repeat; see `Network.repeated`

    def __post_init__(self) -> None:
        self._known: dict[Pair, Route] = {}
        self.links: dict[str, float] = {}
        if self.memory is not None:
            self.links |= {_memory(host): self.memory for host in self.hosts}
        if self.rails == 1:
            self.links |= {link: self.card for host in self.hosts for link in _card(host)}

    def __getitem__(self, pair: Pair) -> Route:
        if pair not in self._known:
            self._known[pair] = self._route(*pair)
        return self._known[pair]

    def _route(self, sender: Hashable, receiver: Hashable) -> Route:
        if sender == receiver:
            memory = _memory(sender)
            return self.inside._replace(links=(memory,)) if memory in self.links else self.inside
        rail = ""
        if isinstance(sender, tuple) and isinstance(receiver, tuple):  # with their cards
            rail = f"rail {sender[1]}: "
            sender, receiver = sender[0], receiver[0]
        if sender not in self.hosts or receiver not in self.hosts:
            raise KeyError((sender, receiver))
        latency = self.between.latency
        between: dict[str, float] = {}
        if self.topology is not None:
            further, between = self.topology.route(sender, receiver, self.between.bandwidth)  # type: ignore[arg-type]
            latency += further
        if n := self.period:
            receiver = receiver % n + sender // n * n  # type: ignore[operator]
        links = {_card(sender)[0]: self.card, **between, _card(receiver)[1]: self.card}
        self.links |= {rail + name: capacity for name, capacity in links.items()}
        return Route(latency, self.between.bandwidth, tuple(rail + name for name in links))

    def __iter__(self) -> Iterator[Pair]:
        for g in self.hosts:
            for h in self.hosts:
                if g == h or self.rails == 1:
                    yield g, h
                else:
                    yield from (((g, rail), (h, rail)) for rail in range(self.rails))

    def __len__(self) -> int:
        hosts = len(self.hosts)
        return hosts + self.rails * hosts * (hosts - 1)

    def examples(self) -> list[Pair]:
        """Return a pair of each kind, which stand for all."""
        return [*islice(self, min(len(self.hosts), 2))]


def _card(host: Hashable) -> tuple[str, str]:
    """Return the names of the two directions of a host's network card."""
    return f"from {host}", f"to {host}"


def _memory(host: Hashable) -> str:
    return f"inside {host}"

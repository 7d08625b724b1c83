"""The network between ranks: latency and bandwidth of every pair of hosts, and shared links.

A `Network` is specified by numbers; virtual ranks send messages on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from pydtnn.tools.perfmodel.topology import Topology
from pydtnn.utils.validate import check_float

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
        near = latency if local_latency is None else local_latency
        fast = bandwidth if local_bandwidth is None else local_bandwidth
        card = bandwidth if card is None else card
        for one in (bandwidth, fast, card, *([] if memory is None else [memory])):
            check_float("Network", "bandwidth", one, above=0)
        for one in (latency, near):
            check_float("Network", "latency", one, at_least=0)
        inside, between = Route(near, fast, ()), Route(latency, bandwidth, ())
        every = dict.fromkeys(hosts)
        routes = _AlikeRoutes(every, inside, between, card, memory, topology, rails)
        place = defaultdict[Hashable, Iterator[int]](count)
        cards = tuple(next(place[host]) % rails for host in hosts) if rails > 1 else ()
        return cls(tuple(hosts), routes, routes.links, add, cards)


@dataclass(eq=False)
class _AlikeRoutes(dict[Pair, Route]):
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
        self.links: dict[str, float] = {}
        if self.memory is not None:
            self.links |= {_memory(host): self.memory for host in self.hosts}
        if self.rails == 1:
            self.links |= {link: self.card for host in self.hosts for link in _card(host)}

    def __missing__(self, pair: Pair) -> Route:
        return self.setdefault(pair, self._route(*pair))

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


def _card(host: Hashable) -> tuple[str, str]:
    """Return the names of the two directions of a host's network card."""
    return f"from {host}", f"to {host}"


def _memory(host: Hashable) -> str:
    return f"inside {host}"

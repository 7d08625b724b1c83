"""The network between ranks: latency and bandwidth of every pair of hosts, and shared links.

A `Network` is specified by numbers or measured on the ranks of a job; `cost` uses it to predict the
time of a schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.probe import Probe

Pair = tuple[Hashable, Hashable]
"""The sending and the receiving host; equal for messages inside a host."""


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

    References
    ----------
    Alexandrov, Ionescu, Schauser, Scheiman, LogGP: incorporating long messages into the LogP model,
    1995: a latency and a time per byte. Its processor overhead is part of the latency here.
    """

    hosts: tuple[Hashable, ...]
    routes: Mapping[Pair, Route]
    links: Mapping[str, float]
    add: float = 0.0

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
    ) -> Network:
        """Create a network of identical hosts, on a switch that is never the bottleneck.

        Each host has a network card, which its ranks share and which is full duplex.

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

        Examples
        --------
        >>> network = Network.create("aab", latency=5e-5, bandwidth=1.25e8)
        >>> network.routes["a", "b"]
        Route(latency=5e-05, bandwidth=125000000.0, links=('from a', 'to b'))
        """
        between = Route(latency, bandwidth, ())
        inside = Route(
            latency if local_latency is None else local_latency,
            bandwidth if local_bandwidth is None else local_bandwidth,
            (),
        )
        names = dict.fromkeys(hosts)
        card = bandwidth if card is None else card
        links = {link: card for host in names for link in _card(host)}
        if memory is not None:
            links |= {_memory(h): memory for h in names}
        routes = _AlikeRoutes(names, inside, between, memory is not None)
        return cls(tuple(hosts), routes, links, add)

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
        routes: dict[Pair, Route]
        between, cards = probe.between(), probe.cards()
        if probe.emulated():
            for (host, _), (_, bandwidth) in between.items():
                cards[host] = max(cards[host], bandwidth)
        routes = {pair: Route(*found, ()) for pair, found in between.items()}
        links = {link: rate for host, rate in cards.items() for link in _card(host)}
        routes |= {
            pair: Route(*found, (_memory(pair[0]),)) for pair, found in probe.inside().items()
        }
        links |= {_memory(host): rate for host, rate in probe.memories().items()}
        return cls(comm.hosts, _with_cards(routes), links, probe.add())


class _AlikeRoutes(Mapping[Pair, Route]):
    """The routes between equal hosts, which are computed when they are needed."""

    def __init__(
        self, hosts: Mapping[Hashable, None], inside: Route, between: Route, shared: bool
    ) -> None:
        self._hosts, self._inside, self._between, self._shared = hosts, inside, between, shared
        self._known: dict[Pair, Route] = {}

    def __getitem__(self, pair: Pair) -> Route:
        if pair not in self._known:
            self._known[pair] = self._route(*pair)
        return self._known[pair]

    def _route(self, sender: Hashable, receiver: Hashable) -> Route:
        if sender not in self._hosts or receiver not in self._hosts:
            raise KeyError((sender, receiver))
        if sender != receiver:
            return self._between._replace(links=(_card(sender)[0], _card(receiver)[1]))
        return self._inside._replace(links=(_memory(sender),)) if self._shared else self._inside

    def __iter__(self) -> Iterator[Pair]:
        return ((g, h) for g in self._hosts for h in self._hosts)

    def __len__(self) -> int:
        return len(self._hosts) ** 2

    def examples(self) -> list[Pair]:
        """Return a pair of each kind, which stand for all."""
        hosts = [*islice(self._hosts, 2)]
        return [(hosts[0], other) for other in hosts]


def _card(host: Hashable) -> tuple[str, str]:
    """Return the names of the two directions of a host's network card."""
    return f"from {host}", f"to {host}"


def _memory(host: Hashable) -> str:
    return f"inside {host}"


def _with_cards(routes: Mapping[Pair, Route]) -> dict[Pair, Route]:
    """Add the cards of both hosts to the links of every route between two hosts."""
    return {
        (g, h): route if g == h else route._replace(links=(_card(g)[0], _card(h)[1]))
        for (g, h), route in routes.items()
    }

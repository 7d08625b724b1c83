"""Closed formulas of collective operations, as coefficients of a linear model.

With n bytes, latency alpha, time per byte beta and time to add a byte gamma, an operation takes

    rounds alpha + sent n beta + added n gamma

and a rank handles `messages` messages. P is the number of ranks, q = (P - 1) / P and
h = log2 P, rounded up. For an all-gather and a reduce-scatter n is the length of the whole array.

For groups of ranks that are placed on hosts, messages inside a host and between hosts have terms of
their own. Those between hosts count the bytes that pass through the card of a host, which its ranks
share; several groups that communicate at the same time through one card multiply them
(`Placement.sharing`).

References
----------
Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005;
Rabenseifner, Optimization of collective reduction operations, 2004.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isqrt
from operator import add
from typing import NamedTuple

import numpy as np

from pydtnn.utils.names import unknown


class Terms(NamedTuple):
    """Coefficients of the cost of an operation.

    Attributes
    ----------
    rounds : float
        Messages that follow one another: latencies.
    sent : float
        Bytes that pass through the busiest link, in units of the length of the array.
    added : float
        Bytes that a rank adds, in the same unit.
    messages : float
        Messages that a rank sends.
    """

    rounds: float = 0.0
    sent: float = 0.0
    added: float = 0.0
    messages: float = 0.0

    def plus(self, other: Terms) -> Terms:
        """Return the terms of this operation and then another one."""
        return Terms(*map(add, self, other))


NONE = Terms()
"""The terms of a sum over a single rank."""

Formula = Callable[[int], Terms]
"""Terms for a number of ranks, at least 2."""


def log2_up(ranks: int) -> int:
    """Return log2 of a number of ranks, rounded up.

    >>> [log2_up(ranks) for ranks in (2, 3, 4, 5)]
    [1, 2, 2, 3]
    """
    return (ranks - 1).bit_length()


def _q(ranks: int) -> float:
    return (ranks - 1) / ranks


def _columns(ranks: int) -> int:
    """Return the columns of the grid of `torus`."""
    return ranks // max(rows for rows in range(1, isqrt(ranks) + 1) if ranks % rows == 0)


def _folded(formula: Formula) -> Formula:
    """Extend a formula for 2^k ranks: the others send their array first and receive the result."""

    def extended(ranks: int) -> Terms:
        power = 1 << (ranks.bit_length() - 1)
        inner = formula(power)
        return inner if power == ranks else inner.plus(Terms(2, 2, 1, 2))

    return extended


def _same(rounds: Callable[[int], float], sent: float, added: float) -> Formula:
    """Return a formula in which every round sends one message, and volumes are in units of q."""
    return lambda p: Terms(rounds(p), sent * _q(p), added * _q(p), rounds(p))


ALGORITHMS: dict[str, Formula] = {
    "ring": _same(lambda p: 2 * (p - 1), 2, 1),
    "bidirectional_ring": lambda p: Terms(2 * (p - 1), 2 * _q(p), _q(p), 4 * (p - 1)),
    "recursive_doubling": _folded(lambda p: Terms(*[float(log2_up(p))] * 4)),
    "halving_doubling": _folded(_same(lambda p: 2 * log2_up(p), 2, 1)),
    "binomial_tree": lambda p: Terms(2 * log2_up(p), 2 * log2_up(p), log2_up(p), 2 * log2_up(p)),
    "direct": lambda p: Terms(2, 2 * _q(p), _q(p), 2 * (p - 1)),
    "torus": _same(lambda p: 2 * (p // _columns(p) + _columns(p) - 2), 2, 1),
}
"""The formulas of an allreduce, by algorithm; "halving_doubling" is Rabenseifner's."""


def terms_of(algorithm: str, ranks: int) -> Terms:
    """Return the coefficients of an allreduce on links of one kind that no messages share.

    Parameters
    ----------
    algorithm : str
        A name in `ALGORITHMS`.
    ranks : int

    Returns
    -------
    Terms
        Zero for one rank.

    Raises
    ------
    ValueError
        If there is no formula of this name.

    Examples
    --------
    >>> terms_of("ring", 4)
    Terms(rounds=6, sent=1.5, added=0.75, messages=6)
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"formulas: {unknown('formula of allreduce', algorithm, ALGORITHMS)}")
    return NONE if ranks == 1 else ALGORITHMS[algorithm](ranks)


LIBRARY = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
"""How many times (P - 1) / P of an array's bytes pass the slowest link; others pass none."""


def library_terms(kind: str, ranks: int) -> Terms:
    """Return the coefficients of a collective call of an MPI library: a tree, and least bytes."""
    sent = LIBRARY.get(kind, 0.0) * _q(ranks)
    return Terms(log2_up(ranks), sent, 0.0, log2_up(ranks)) if ranks > 1 else NONE


# -- groups of ranks on hosts ----------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """The network of equal hosts.

    Attributes
    ----------
    latency, bandwidth : float
        Of a message between hosts, in s and B/s.
    card : float
        Rate of a host's card in each direction, in B/s.
    local_latency, local_bandwidth : float
        Of a message inside a host.
    local_capacity : float
        Sum of the rates of all messages inside a host, in B/s.
    add : float
        Time to add a byte, in s/B.
    overhead : float
        Time of the processor for a message, in s.
    copy : float
        Time of the processor for a byte of a message, in s/B.
    """

    latency: float
    bandwidth: float
    card: float
    local_latency: float
    local_bandwidth: float
    local_capacity: float
    add: float = 0.0
    overhead: float = 0.0
    copy: float = 0.0


class Placement(NamedTuple):
    """A group of ranks on hosts.

    Attributes
    ----------
    ranks : int
    per_host : int
        Ranks of the group on each host.
    sharing : int
        Groups that communicate at the same time through the card of a host.
    together : int
        Groups that communicate at the same time inside a host.
    """

    ranks: int
    per_host: int
    sharing: int = 1
    together: int = 1

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return ceil(self.ranks / self.per_host)

    @classmethod
    def along(cls, ranks: int, stride: int, per_host: int, total: int) -> Placement:
        """Return the placement of the groups along an axis of a mesh.

        Parameters
        ----------
        ranks : int
            Ranks along the axis.
        stride : int
            Distance between them: the product of the axes after this one.
        per_host : int
            Ranks of all groups on a host, next to each other.
        total : int
            Ranks of the job.

        Examples
        --------
        >>> Placement.along(ranks=4, stride=2, per_host=4, total=8)
        Placement(ranks=4, per_host=2, sharing=2, together=2)

        Of four pairs on hosts of three ranks, one pair of each host but the last is on two.

        >>> Placement.along(ranks=2, stride=1, per_host=3, total=8)
        Placement(ranks=2, per_host=1, sharing=1, together=1)
        """
        own = min(per_host, total)
        inside = min(ranks, max(1, own // stride))
        groups = max(1, own // inside)
        if total <= per_host or per_host % (inside * stride) == 0 or inside == 1:
            return cls(ranks, inside, groups, groups)
        # some groups are on more hosts than others, which wait for them
        numbers = np.arange(total)
        group = numbers // (ranks * stride) * stride + numbers % stride
        places = np.unique(np.stack([group, numbers // per_host]), axis=1)
        hosts = np.bincount(places[0])
        sharing = np.bincount(places[1][hosts[places[0]] > 1]).max(initial=1)
        return cls(ranks, max(1, ranks // int(hosts.max())), int(sharing), groups)


class Placed(NamedTuple):
    """Terms of the messages inside hosts and between them.

    Attributes
    ----------
    local, between : Terms
    flows : float
        Messages of the group that leave a host at the same time.
    beside : float
        Bytes of messages inside hosts at the same time as those between them, in arrays.
    """

    local: Terms
    between: Terms
    flows: float = 1.0
    beside: float = 0.0


def allreduce_terms(algorithm: str, group: Placement) -> Placed:
    """Return the terms of an allreduce of a group.

    Parameters
    ----------
    algorithm : str
        "ring", "recursive_doubling" and so on, "hierarchical", or "leaders": a reduction inside
        each host, an allreduce of one rank of each host, and a broadcast.
    group : Placement

    Raises
    ------
    ValueError
        If there is no formula for the algorithm.
    """
    ranks, inside, hosts = group.ranks, group.per_host, group.hosts
    if algorithm == "hierarchical":
        return _hierarchical(inside, hosts)
    if algorithm == "leaders":
        return Placed(terms_of("binomial_tree", inside), _between_leaders(hosts))
    whole = terms_of(algorithm, ranks)
    if hosts == 1:
        return Placed(whole, NONE)
    if inside == 1:
        return Placed(NONE, whole, whole.messages / whole.rounds)
    doubling = algorithm in ("recursive_doubling", "halving_doubling", "binomial_tree")
    odd = inside & (inside - 1) or (ranks & (ranks - 1) and algorithm != "binomial_tree")
    if algorithm == "torus" or (doubling and odd):
        raise ValueError(
            f"formulas: {algorithm} has no closed formula for {hosts} hosts of {inside} ranks; "
            "use pydtnn.comm.schedules.cost, which replays it"
        )
    if doubling:
        return _doubling(algorithm, inside, hosts)
    if algorithm == "direct":  # a host sends to all ranks of the other hosts
        sent = 2 * inside * (ranks - inside) / ranks
        return Placed(NONE, whole._replace(sent=sent), inside * (ranks - inside))
    # rounds of rings are as fast as their slowest message
    return Placed(NONE, whole, whole.messages / whole.rounds, beside=whole.sent)


def _hierarchical(inside: int, hosts: int) -> Placed:
    """The schedule "hierarchical": each rank of a host sums a part between the hosts."""
    scatter, terms = terms_of("direct", inside), _between_leaders(hosts)
    # every rank sends 1 / inside, all of them through one card
    return Placed(scatter, terms._replace(added=terms.added / inside), inside)


def _between_leaders(hosts: int) -> Terms:
    return terms_of("ring" if hosts & (hosts - 1) else "halving_doubling", hosts)


def _doubling(algorithm: str, inside: int, hosts: int) -> Placed:
    """Algorithms with distances 1, 2, 4, ...: first inside hosts, then between them."""
    local = terms_of(algorithm, inside)
    between = terms_of(algorithm, hosts)
    if algorithm == "recursive_doubling":
        return Placed(local, between._replace(sent=inside * between.sent), inside)
    if algorithm == "binomial_tree":
        return Placed(local, between)
    return Placed(local, between._replace(added=between.added / inside), inside)


class Stretch(NamedTuple):
    """Factors of a topology on the latencies and transfers of the messages between hosts."""

    latency: float = 1.0
    transfer: float = 1.0


PLAIN = Stretch()
"""Hosts at one switch that is never the bottleneck."""


class Phase(NamedTuple):
    """The messages of an operation inside hosts, or between them.

    Attributes
    ----------
    rounds : float
    latency : float
        Of all rounds, in s.
    transfer : float
        Time for which the link is busy, in s.
    work : float
        Time of the processor: calls, copies and additions, in s.
    """

    rounds: float
    latency: float
    transfer: float
    work: float

    @property
    def seconds(self) -> float:
        """Time of one array that is alone on its links."""
        return self.latency + self.transfer + self.work


def phases(
    placed: Placed, nbytes: float, links: Links, group: Placement, stretch: Stretch = PLAIN
) -> tuple[Phase, Phase]:
    """Return the times of an operation on an array: inside hosts, and between them.

    Parameters
    ----------
    placed : Placed
    nbytes : float
        Length of the array.
    links : Links
    group : Placement
    stretch : Stretch, optional
    """
    local, between = placed.local, placed.between
    # in a round, ranks that send inside their host: of a ring, one sends to the next host
    flows = group.together * (group.per_host - bool(placed.beside))
    at_once = local.messages / local.rounds if local.messages else 1.0  # messages of each of them
    inside = max(1 / (at_once * links.local_bandwidth), flows / links.local_capacity)
    outside = max(1 / (placed.flows * links.bandwidth), group.sharing / links.card)
    call = 2 * links.overhead  # to send and to receive
    latency = stretch.latency * between.rounds * links.latency
    transfer = stretch.transfer * nbytes * between.sent * outside
    if placed.beside:  # the messages inside may take longer
        beside = between.rounds * links.local_latency + nbytes * placed.beside * inside
        transfer = max(transfer, beside - latency)

    def work(terms: Terms, sent: float) -> float:
        return call * terms.messages + nbytes * (terms.added * links.add + sent * links.copy)

    near = local.rounds * links.local_latency, nbytes * local.sent * inside
    return (
        Phase(local.rounds, *near, work(local, 0.0)),  # the link copies messages inside a host
        Phase(between.rounds, latency, transfer, work(between, between.sent / group.per_host)),
    )

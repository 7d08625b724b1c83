"""Collective operations of groups of ranks that are placed on hosts.

Messages inside a host and between hosts have terms of their own. Those between hosts count the
bytes that pass through the card of a host, which its ranks share; several groups that communicate
at the same time through one card multiply them (`Placement.sharing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from pydtnn.perfmodel.formulas.table import NONE, Terms, terms_of


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
        """
        own = min(per_host, total)
        inside = min(ranks, max(1, own // stride))
        groups = max(1, own // inside)
        return cls(ranks, inside, groups, groups)


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
        tree = terms_of("allreduce", "binomial_tree", inside)
        return Placed(tree, _between_leaders(hosts))
    whole = terms_of("allreduce", algorithm, ranks)
    if hosts == 1:
        return Placed(whole, NONE)
    if inside == 1:
        return Placed(NONE, whole, whole.messages / whole.rounds)
    if algorithm in ("recursive_doubling", "halving_doubling", "binomial_tree"):
        odd = ranks & (ranks - 1) and algorithm != "binomial_tree"
        if inside & (inside - 1) or odd:
            raise _refuse(algorithm, group)
        return _doubling(algorithm, inside, hosts)
    if algorithm == "torus":
        raise _refuse(algorithm, group)
    if algorithm == "direct":  # a host sends to all ranks of the other hosts
        sent = 2 * inside * (ranks - inside) / ranks
        return Placed(NONE, whole._replace(sent=sent), inside * (ranks - inside))
    # rounds of rings are as fast as their slowest message
    return Placed(NONE, whole, whole.messages / whole.rounds, beside=whole.sent)


def _refuse(algorithm: str, group: Placement) -> ValueError:
    return ValueError(
        f"formulas: {algorithm} has no closed formula for {group.hosts} hosts of {group.per_host} "
        "ranks; use pydtnn.comm.schedules.cost, which replays it"
    )


def _hierarchical(inside: int, hosts: int) -> Placed:
    """The schedule "hierarchical": each rank of a host sums a part between the hosts."""
    scatter = terms_of("allreduce", "direct", inside)
    between = "halving_doubling" if hosts & (hosts - 1) == 0 else "ring"
    terms = terms_of("allreduce", between, hosts)
    # every rank sends 1 / inside, all of them through one card
    return Placed(scatter, terms._replace(added=terms.added / inside), inside)


def _between_leaders(hosts: int) -> Terms:
    power = hosts & (hosts - 1) == 0
    return terms_of("allreduce", "halving_doubling" if power else "ring", hosts)


def _doubling(algorithm: str, inside: int, hosts: int) -> Placed:
    """Algorithms with distances 1, 2, 4, ...: first inside hosts, then between them."""
    local = terms_of("allreduce", algorithm, inside)
    between = terms_of("allreduce", algorithm, hosts)
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
    placed: Placed,
    nbytes: float,
    links: Links,
    group: Placement,
    stretch: Stretch = PLAIN,
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
    flows = group.together * group.per_host  # in a round, ranks that send
    at_once = local.messages / local.rounds if local.messages else 1.0  # messages of each of them
    inside = max(1 / (at_once * links.local_bandwidth), flows / links.local_capacity)
    outside = max(1 / (placed.flows * links.bandwidth), group.sharing / links.card)
    call = 2 * links.overhead  # to send and to receive
    latency = stretch.latency * between.rounds * links.latency
    transfer = stretch.transfer * nbytes * between.sent * outside
    if placed.beside:  # the messages inside may take longer
        near = between.rounds * links.local_latency + nbytes * placed.beside * inside
        transfer = max(transfer, near - latency)

    def work(terms: Terms, sent: float) -> float:
        return call * terms.messages + nbytes * (terms.added * links.add + sent * links.copy)

    return (
        Phase(
            local.rounds,
            local.rounds * links.local_latency,
            nbytes * local.sent * inside,
            work(local, local.sent),
        ),
        Phase(
            between.rounds,
            latency,
            transfer,
            work(between, between.sent / group.per_host),
        ),
    )

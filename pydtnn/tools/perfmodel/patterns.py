"""Patterns of messages, schedules among them, as rounds on the links of a platform.

A pattern is an algorithm of `pydtnn.comm.schedules`, or a formula: the messages of each rank. Those
that depend only on earlier ones form a row (`pydtnn.tools.perfmodel.engine.rows`), in which they
start together: the busiest link, and the longest message, determine its time. All groups along an
axis of a mesh communicate at the same time, over the cards of hosts and the links of a topology.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pydtnn.tools.perfmodel.engine.rows import MessageRow, messages_by_row
from pydtnn.tools.perfmodel.overlap import Round
from pydtnn.tools.perfmodel.platform import Link, Platform
from pydtnn.tools.perfmodel.topology import Topology

MANY_RANKS = 64
"""Ranks of a group up to which all messages between any two of them are followed."""

MAX_ROUNDS = 32
"""Rounds of a pattern that are followed one by one; more are merged."""

PIECE = 1 << 16
"""Bytes of a message that are copied after the last of them has arrived."""

LIBRARY = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
"""How many times (P - 1) / P of an array's bytes pass the slowest link in a call of an MPI library;
others pass none."""


def library_terms(kind: str, ranks: int) -> tuple[int, float]:
    """Return the latencies of a collective call of an MPI library, of a tree, and its bytes.

    >>> library_terms("allgather", 4)
    (2, 0.75)
    """
    return (ranks - 1).bit_length(), LIBRARY.get(kind, 0.0) * (ranks - 1) / ranks


# -- places ---------------------------------------------------------------------------------------


class AxisGroups(NamedTuple):
    """The groups of ranks along an axis of a mesh.

    Attributes
    ----------
    ranks : int
        Of a group.
    stride : int
        Distance between them: the product of the axes after this one.
    per_host : int
        Ranks of all groups on a host, next to each other.
    total : int
        Ranks of the job.
    stage : tuple of int
        Of the groups that communicate, a position of their ranks along another axis, its stride and
        its ranks; empty if all groups do.
    pair : tuple of int
        The two ranks of each group that communicate; empty if all do.
    """

    ranks: int
    stride: int
    per_host: int
    total: int
    stage: tuple[int, ...] = ()
    pair: tuple[int, ...] = ()

    @property
    @lru_cache(maxsize=256)  # noqa: B019  of values that are equal
    def members(self) -> np.ndarray:
        """The ranks of each group, (groups, ranks): of groups on the most hosts, which are last.

        With a `pair`, those of all groups.
        """
        numbers = np.arange(self.total).reshape(-1, self.ranks, self.stride)
        every = numbers.transpose(0, 2, 1).reshape(-1, self.ranks)
        if self.pair:
            return every[:, self.pair]
        if self.stage:
            position, stride, ranks = self.stage
            every = every[every[:, 0] // stride % ranks == position]
        changes = np.diff(np.sort(every // self.per_host, axis=1), axis=1) > 0
        spread = changes.sum(axis=1)
        return every[spread == spread.max()]

    @property
    def places(self) -> tuple[int, ...]:
        """The host of each rank of one of them."""
        return tuple((self.members[0] // self.per_host).tolist())

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def hosts(self) -> int:
        """Number of hosts of one of them."""
        return len({*self.places})


class Wires(NamedTuple):
    """What messages pass through.

    Attributes
    ----------
    inside, between : Link
        Inside a host and between hosts.
    topology : Topology or None
    rails : int
        Network cards of a host.
    """

    inside: Link
    between: Link
    topology: Topology | None
    rails: int

    @classmethod
    def of(cls, platform: Platform, ranks: int) -> Wires:
        """Return those of a job of so many ranks."""
        messages = platform.messages
        return cls(messages.inside, platform.between(ranks), platform.topology, messages.rails)


# -- times ----------------------------------------------------------------------------------------


class RoundCosts(NamedTuple):
    """Costs of messages that start together.

    Attributes
    ----------
    latency : float
        Of messages between hosts in s, 0 if there are none.
    alone, shared : float
        Time for each byte of the array in s/B of the longest message on its own, and on the busiest
        card or link.
    local_latency, local : float
        Latency, and time for each byte, of messages inside a host.
    memory : float
        Part of `local` for which the memory of the busiest host is.
    calls, added, copied : float
        Messages that the rank with the most of all rows sends and receives; what a rank adds, and
        what it sends to other hosts and receives from them, in arrays.
    """

    latency: float = 0.0
    alone: float = 0.0
    shared: float = 0.0
    local_latency: float = 0.0
    local: float = 0.0
    memory: float = 0.0
    calls: float = 0.0
    added: float = 0.0
    copied: float = 0.0

    def link(self, nbytes: float) -> tuple[float, float, float]:
        """Return the latency, the time of the transfer, and that in which links are free, in s."""
        inside, memory = self.local * nbytes, self.memory * nbytes
        if not self.shared:
            return self.local_latency, inside, inside - memory
        busy = max(self.shared * nbytes, memory)
        transfer = max(self.alone * nbytes, busy, self.local_latency + inside - self.latency)
        return self.latency, transfer, transfer - busy


class Processing(NamedTuple):
    """Time of the processor for a message in s, and for a byte that it adds or copies in s/B."""

    call: float = 0.0
    add: float = 0.0
    copy: float = 0.0

    def round(self, row: RoundCosts, nbytes: float, parts: float = 1.0, chunks: int = 1) -> Round:
        """Return the round of a row, each message of which takes calls for so many parts.

        While a chunk of the array is in transit, others are posted and added.
        """
        messages = parts * chunks * row.calls
        calls, added = messages * self.call, nbytes * self.add * row.added
        latency, transfer, spare = row.link(nbytes)
        copied = nbytes * row.copied
        piece = self.copy * min(copied, PIECE * messages)
        work, hidden = (added, 0.0) if chunks == 1 else (0.0, added)
        copying = self.copy * copied + hidden, piece + hidden / chunks
        return Round(latency, transfer, work, spare, *copying, calls, calls * (1 - 1 / chunks))


def ring_seconds(kind: str, groups: AxisGroups, wires: Wires, nbytes: float) -> float:
    """Return the time of a collective of a vendor's library for accelerators, in s.

    It has the latencies of a tree, and sends around rings, one on each card of a host that the
    groups on the host leave to each other.

    Parameters
    ----------
    kind : str
        As for `library_terms`.
    groups : AxisGroups
    wires : Wires
    nbytes : float
        Of the whole array.
    """
    if groups.ranks == 1:
        return 0.0
    rounds, sent = library_terms(kind, groups.ranks)
    rows = rows_of("around", groups, wires)
    together = groups.per_host // max(groups.ranks // groups.hosts, 1)
    rings = max(wires.rails // max(together, 1), 1) if groups.hosts > 1 else 1
    first = rows[0]._replace(shared=rows[0].shared / rings, alone=rows[0].alone / rings)
    return rounds * max(row.link(0.0)[0] for row in rows) + first.link(nbytes * sent)[1]


@lru_cache(maxsize=4096)
def rows_of(pattern: str, groups: AxisGroups, wires: Wires) -> tuple[RoundCosts, ...]:
    """Return the costs of the rows of a pattern, of all groups at the same time."""
    if pattern == "to_all" and groups.ranks > MANY_RANKS and wires.topology is None:
        return (_to_all_row(groups, wires),)
    members = groups.members
    places = members // groups.per_host
    kinds, own = np.unique(places - places[:, :1], axis=0, return_inverse=True)
    layouts = [tuple(np.unique(kind, return_inverse=True)[1].tolist()) for kind in kinds]
    tables = [messages_by_row(pattern, layout) for layout in layouts]
    known: dict[tuple[int, ...], tuple[RoundCosts, np.ndarray]] = {}
    found = []
    for k in range(max(map(len, tables))):
        rows = [(i, table[k]) for i, table in enumerate(tables) if k < len(table)]
        key = tuple(id(row) for _, row in rows)
        if key not in known:
            ones = [_numbered(row, members[own.ravel() == i]) for i, row in rows]
            together = MessageRow(*map(np.concatenate, zip(*ones, strict=True)))
            known[key] = _row(together, groups.per_host, wires), _work(together, groups)
        found.append(known[key])
    if not found:
        return ()
    count = Counter(id(row) for row, _ in found)
    if len(found) > 4 * MANY_RANKS:  # of few kinds
        totals = np.sum([count[id(row)] * work for row, work in known.values()], axis=0)
    else:
        totals = np.sum([work for _, work in found], axis=0)
    busiest = totals.argmax(axis=1)
    costs = {
        id(row): row._replace(**dict(zip(WORK, work[range(3), busiest].tolist(), strict=True)))
        for row, work in known.values()
    }
    return tuple(costs[id(row)] for row, _ in found)


def _to_all_row(groups: AxisGroups, wires: Wires) -> RoundCosts:
    """Return the costs of messages to all ranks of the groups."""
    ranks, inside, between = groups.ranks, wires.inside, wires.between
    hosts, place = np.divmod(groups.members, groups.per_host)
    count = np.zeros((len(hosts), hosts.max() + 1, wires.rails))  # of ranks by group, host, rail
    np.add.at(count, (np.arange(len(hosts))[:, None], hosts, place % wires.rails), 1)
    here = count.sum(axis=2, keepdims=True)
    near = float((here * (here - 1)).sum(axis=0).max()) / ranks
    ways = count * (ranks - here), here * (count.sum(axis=1, keepdims=True) - count)
    far = max(float(one.sum(axis=0).max()) for one in ways) / ranks  # sent and received
    memory = near / inside.shared if inside.shared else 0.0
    local = max(1 / ranks / inside.bandwidth, memory)
    return RoundCosts(
        latency=between.latency,
        alone=1 / ranks / between.bandwidth,
        shared=far / (between.shared or between.bandwidth),
        local_latency=inside.latency if near else 0.0,
        local=local if near else 0.0,
        memory=memory,
        calls=2.0 * (ranks - 1),
        copied=2 * (ranks - float(here[here > 0].min())) / ranks,
    )


@lru_cache(maxsize=4096)
def _merged_rows(
    pattern: str, groups: AxisGroups, wires: Wires
) -> list[tuple[tuple[RoundCosts, int], ...]]:
    """Return at most `MAX_ROUNDS` groups of rows, and how often each is in a group."""
    rows = rows_of(pattern, groups, wires)
    size = -(-len(rows) // MAX_ROUNDS) or 1
    return [(*Counter(rows[i : i + size]).items(),) for i in range(0, len(rows), size)]


@lru_cache(maxsize=1 << 14)
def rounds_of(
    pattern: str,
    groups: AxisGroups,
    wires: Wires,
    processing: Processing,
    nbytes: float,
    parts: float = 1.0,
    chunks: int = 1,
) -> tuple[Round, ...]:
    """Return the rounds of a pattern for an array of so many bytes, at most `MAX_ROUNDS`."""
    return tuple(
        Round(*(sum(n * one[i] for one, n in times) for i in range(len(Round._fields))))
        for rows in _merged_rows(pattern, groups, wires)
        for times in [[(processing.round(row, nbytes, parts, chunks), n) for row, n in rows]]
    )


def _numbered(row: MessageRow, members: np.ndarray) -> MessageRow:
    """Return the messages of a row in all groups, with the numbers of ranks in the job."""
    ends = (members[:, one].ravel() for one in row[:2])
    return MessageRow(*ends, *(np.tile(one, len(members)) for one in row[2:]))


WORK = ("calls", "added", "copied")


def _work(row: MessageRow, groups: AxisGroups) -> np.ndarray:
    """Return the `WORK` of each rank, (kinds, ranks)."""
    senders, receivers, shares, adds = row
    far = senders // groups.per_host != receivers // groups.per_host
    kinds: tuple[tuple[np.ndarray, np.ndarray | None], ...] = (
        (np.concatenate([senders, receivers]), None),
        (receivers, adds),
        (np.concatenate([senders, receivers]), np.tile(shares * far, 2)),
    )
    return np.stack([np.bincount(keys, amounts, groups.total) for keys, amounts in kinds])


def _row(row: MessageRow, per_host: int, wires: Wires) -> RoundCosts:
    senders, receivers, shares, _ = row
    here, there = senders // per_host, receivers // per_host
    far, near = here != there, here == there
    found: dict[str, float] = {}
    if near.any():
        inside = wires.inside
        capacity = _most(here[near], shares[near]) / inside.shared if inside.shared else 0.0
        found["local_latency"] = inside.latency
        found["local"] = max(shares[near].max() / inside.bandwidth, capacity)
        found["memory"] = capacity
    if far.any():
        between, shares = wires.between, shares[far]
        rail = senders[far] % per_host % wires.rails
        ends = np.stack([here[far], there[far]])
        cards = max(_most(end * wires.rails + rail, shares) for end in ends)
        further, links = _through(wires, (*ends, rail), shares)
        found["latency"] = between.latency + further
        found["alone"] = shares.max() / between.bandwidth
        found["shared"] = max(cards / (between.shared or between.bandwidth), links)
    return RoundCosts(**{name: float(value) for name, value in found.items()})


def _most(keys: np.ndarray, amounts: np.ndarray) -> float:
    """Return the largest sum of the amounts with the same key."""
    return float(np.bincount(keys, amounts).max())


def _through(wires: Wires, ends: tuple[np.ndarray, ...], shares: np.ndarray) -> tuple[float, float]:
    """Return the longest latency of a topology, and the time of its busiest link."""
    if wires.topology is None:
        return 0.0, 0.0
    loads: Counter[tuple[int, str]] = Counter()
    latencies = [0.0]
    pairs, number = np.unique(np.stack(ends), axis=1, return_inverse=True)
    for (source, target, rail), share in zip(
        pairs.T.tolist(), np.bincount(number.ravel(), shares).tolist(), strict=True
    ):
        latency, links = wires.topology.route(source, target, wires.between.bandwidth)
        latencies.append(latency)
        for name, capacity in links.items():
            loads[rail, name] += share / capacity
    return max(latencies), max(loads.values(), default=0.0)

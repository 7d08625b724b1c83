"""Times of schedules for many ranks: all messages of a row at once, in arrays.

A row contains the messages that depend only on those of earlier rows. Each starts when both of its
ranks have ended their earlier messages, and takes the time that it takes if all messages of the row
start together. This is the time of virtual ranks that progress together; it neither overlaps the
chunks of long arrays nor messages of different rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.steps import Part, Round
from pydtnn.tools.perfmodel.engine.flows import Flows
from pydtnn.tools.perfmodel.network import Network, Pair
from pydtnn.tools.schedules.timeline import timeline

MAX_ROUND_BY_ROUND = 64
"""Ranks up to which the rounds of all are generated without looking for a rotation."""


LONG = 1e12
"""Length in B of an array of which the messages take much longer than rounding errors."""


class MessageRow(NamedTuple):
    """Messages of a row.

    Attributes
    ----------
    senders, receivers : ndarray of int
    shares, adds : ndarray of float
        Lengths, and lengths that are added, in arrays.
    """

    senders: np.ndarray
    receivers: np.ndarray
    shares: np.ndarray
    adds: np.ndarray


class RowTimes:
    """A schedule on a network.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `SCHEDULES`, or a user-defined generator function.
    network : Network
    """

    def __init__(self, algorithm: str | Algorithm, network: Network) -> None:
        self._network, self._ranks = network, len(network.hosts)
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._rows = messages_by_row(algorithm, network.hosts)

    @cached_property
    def calls(self) -> np.ndarray:
        """Messages that each rank sends and receives: an array (ranks,)."""
        return sum((self._calls(row) for row in self._rows), np.zeros(self._ranks, int))

    def _calls(self, row: MessageRow) -> np.ndarray:
        both = np.concatenate([row.senders, row.receivers])
        return np.bincount(both, minlength=self._ranks)

    def busy(self, nbytes: int) -> float:
        """Return the time in which the bytes pass, without latencies, in s."""
        return sum(nbytes * float(self._times(row)[1].max()) for row in self._rows)

    def ends(self, starts: np.ndarray, nbytes: int, call: float = 0.0) -> np.ndarray:
        """Return the time at which each rank ends, from those at which they start, in s.

        Parameters
        ----------
        starts : ndarray (ranks,)
        nbytes : int
            Length of the array in B.
        call : float
            Time of a rank's processor per message that it sends or receives, in s.
        """
        now = starts.copy()
        for row in self._rows:
            if call:
                now += call * self._calls(row)
            begin = np.maximum(now[row.senders], now[row.receivers])
            latencies, seconds = self._times(row)
            end = begin + latencies + nbytes * seconds
            after = now.copy()
            np.maximum.at(after, row.senders, end)
            np.maximum.at(after, row.receivers, end)
            if self._network.add:
                np.add.at(after, row.receivers, nbytes * self._network.add * row.adds)
            now = after
        return now

    def _times(self, row: MessageRow) -> tuple[np.ndarray, np.ndarray]:
        """Return the latency of each message, and its time for each byte of the array."""
        if id(row) not in self._known:
            ends = zip(row.senders, row.receivers, strict=True)
            pairs = [self._network.pair(*one) for one in ends]
            latencies = np.array([self._network.routes[pair].latency for pair in pairs])
            self._known[id(row)] = latencies, _seconds(self._network, pairs, row.shares)
        return self._known[id(row)]


def _seconds(network: Network, pairs: Sequence[Pair], shares: np.ndarray) -> np.ndarray:
    """Return how long each message takes if all start together, in s for each byte of an array."""
    flows, seconds = Flows(network), np.zeros(len(pairs))
    for index, (pair, share) in enumerate(zip(pairs, shares.tolist(), strict=True)):
        flows.start(0.0, pair, share * LONG, index)
    while (end := flows.next_end()) < inf:
        seconds[flows.end(end)] = end / LONG
    return seconds


@lru_cache(maxsize=64)
def messages_by_row(
    algorithm: str | Algorithm, hosts: tuple[Hashable, ...]
) -> tuple[MessageRow, ...]:
    """Return the messages of each row.

    Of more than `MAX_ROUND_BY_ROUND` ranks, those of rank 0 stand for all if the others have the
    same ones with all peers turned around by their numbers, or with the bits of these exchanged;
    equal rows are one object then.
    """
    ranks = len(hosts)
    if ranks > MAX_ROUND_BY_ROUND:
        own = rounds(algorithm, 0, hosts)
        others = {rank: rounds(algorithm, rank, hosts) for rank in _samples(ranks)}
        for peer_of in (lambda peer, rank: (peer + rank) % ranks, lambda peer, rank: peer ^ rank):
            if all(_is_moved(own, moved, rank, peer_of) for rank, moved in others.items()):
                known: dict[Hashable, MessageRow] = {}
                facts = (tuple(sorted(_facts(one))) for one in own if any(s.send for s in one))
                return tuple(
                    known.setdefault(one, known.get(one) or _moved(one, ranks, peer_of))
                    for one in facts
                )
    found: dict[int, list[tuple[int, int, float, float]]] = {}
    for message in timeline([rounds(algorithm, rank, hosts) for rank in range(ranks)]).messages:
        length = _length(message.part)
        added = length if message.op == "sum" else 0.0
        entry = message.sender, message.receiver, length, added
        found.setdefault(message.row, []).append(entry)
    return tuple(_columns(found[row]) for row in sorted(found))


Facts = tuple[int, float, float, str]
"""Peer, lengths and operation of a step."""

PeerOf = Callable[[Any, Any], Any]
"""Returns the peer of a rank, from that of rank 0 and its number."""


def _columns(rows: Sequence[tuple[int, int, float, float]]) -> MessageRow:
    return MessageRow(*map(np.array, zip(*rows, strict=True)))


def _samples(ranks: int) -> tuple[int, ...]:
    """Return ranks whose rounds are compared with those of rank 0."""
    return 1, 2, 3, ranks // 3, ranks // 2, ranks - 2, ranks - 1


def _is_moved(own: Sequence[Round], moved: Sequence[Round], rank: int, peer_of: PeerOf) -> bool:
    """Return whether a rank has the rounds of rank 0, with other peers."""
    return len(own) == len(moved) and all(
        sorted((peer_of(peer, rank), *rest) for peer, *rest in _facts(mine)) == sorted(_facts(its))
        for mine, its in zip(own, moved, strict=True)
    )


def _facts(steps: Round) -> list[Facts]:
    return [(one.peer, _length(one.send), _length(one.receive), one.op) for one in steps]


def _length(part: Part | None) -> float:
    return 0.0 if part is None else float(part.stop - part.start)


def _moved(steps: Sequence[Facts], ranks: int, peer_of: PeerOf) -> MessageRow:
    """Return the messages of all ranks in a round that is that of rank 0, with other peers."""
    everyone = np.arange(ranks)
    columns = [
        (peer_of(peer, everyone), everyone, np.full(ranks, length), np.full(ranks, added))
        for peer, _, length, op in steps
        if length
        for added in (length if op == "sum" else 0.0,)
    ]
    return MessageRow(*map(np.concatenate, zip(*columns, strict=True)))

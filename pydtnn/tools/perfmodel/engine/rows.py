"""Messages of schedules for many ranks, in rows of messages that start together.

A row contains the messages that depend only on those of earlier rows, in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.steps import Part, Round
from pydtnn.tools.schedules.timeline import timeline

MAX_ROUND_BY_ROUND = 64
"""Ranks up to which the rounds of all are generated without looking for a rotation."""


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


@lru_cache(maxsize=256)
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
    return tuple(MessageRow(*map(np.array, zip(*found[row], strict=True))) for row in sorted(found))


Facts = tuple[int, float, float, str]
"""Peer, lengths and operation of a step."""

PeerOf = Callable[[Any, Any], Any]
"""Returns the peer of a rank, from that of rank 0 and its number."""


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

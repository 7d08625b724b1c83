"""Messages of schedules for many ranks, in rows of messages that start together.

A row contains the messages that depend only on those of earlier rows, in arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pydtnn.comm.schedules import find, rounds
from pydtnn.comm.schedules.steps import Group, doublings, power_of_two
from pydtnn.tools.schedules.timeline import timeline


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
def messages_by_row(pattern: str, hosts: tuple[Hashable, ...]) -> tuple[MessageRow, ...]:
    """Return the messages of each row, of patterns in `FORMULAS` by these; equal ones are one."""
    ranks = len(hosts)
    if pattern in FORMULAS:
        return (*_in_rows(FORMULAS[pattern](hosts), ranks),)
    algorithm, found = find(pattern), dict[int, list[tuple[int, int, float, float]]]()
    for message in timeline([rounds(algorithm, rank, hosts) for rank in range(ranks)]).messages:
        length = float(message.part.stop - message.part.start)
        added = length if message.op == "sum" else 0.0
        entry = message.sender, message.receiver, length, added
        found.setdefault(message.row, []).append(entry)
    return tuple(MessageRow(*map(np.array, zip(*found[row], strict=True))) for row in sorted(found))


def _ring(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """Yield the rounds of `pydtnn.comm.schedules.algorithms.ring`."""
    everyone, share = np.arange(len(hosts)), np.full(len(hosts), 1 / len(hosts))
    for adds in (share, 0.0 * share):
        yield from (len(hosts) - 1) * [MessageRow(everyone, np.roll(everyone, -1), share, adds)]


def _halving_doubling(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """Yield the rounds of `pydtnn.comm.schedules.algorithms.halving_doubling` of 2^k ranks."""
    everyone, whole = np.arange(len(hosts)), np.ones(len(hosts))
    for k in doublings(len(hosts)):
        yield MessageRow(everyone ^ k, everyone, whole / (2 * k), whole / (2 * k))
    for k in reversed([*doublings(len(hosts))]):
        yield MessageRow(everyone ^ k, everyone, whole / (2 * k), 0 * whole)


def _hierarchical(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """Yield the rounds of `pydtnn.comm.schedules.algorithms.hierarchical`."""
    ranks = Group(0, hosts).by_host
    number, parts = len(ranks), max(map(len, ranks))
    holders = np.array([[own[j % len(own)] for j in range(parts)] for own in ranks])
    pairs = ((r, to) for own, at in zip(ranks, holders, strict=True) for r in own for to in at)
    ends = np.array([pair for pair in pairs if pair[0] != pair[1]], int).reshape(-1, 2).T
    share = np.full(ends.shape[1], 1 / parts)
    yield MessageRow(ends[0], ends[1], share, share)
    known: dict[int, MessageRow] = {}
    between = _halving_doubling if number == power_of_two(number) else _ring
    for row in [*between(range(number))]:
        if id(row) not in known:
            both = (holders[end].T.ravel() for end in row[:2])
            known[id(row)] = MessageRow(*both, *(np.tile(one / parts, parts) for one in row[2:]))
        yield known[id(row)]
    yield MessageRow(ends[1], ends[0], share, 0.0 * share)


def _neighbours(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """Messages to both neighbours in a line of ranks, as those of halos."""
    first, whole = np.arange(len(hosts) - 1), np.ones(2 * len(hosts) - 2)
    ends = np.append(first, first + 1), np.append(first + 1, first)
    yield MessageRow(*ends, whole, 0 * whole)


def _to_next(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """A message to the next rank, as those of the stages of a pipeline."""
    first, whole = np.arange(len(hosts) - 1), np.ones(len(hosts) - 1)
    yield MessageRow(first, first + 1, whole, 0 * whole)


def _to_all(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """A message to each other rank, of a part of the array."""
    senders, receivers = np.nonzero(~np.eye(len(hosts), dtype=bool))
    share = np.full(len(senders), 1 / len(hosts))
    yield MessageRow(senders, receivers, share, 0 * share)


def _around(hosts: Sequence[Hashable]) -> Iterator[MessageRow]:
    """Messages around a ring and at the distances of a tree, whose latencies a library has."""
    everyone, whole = np.arange(len(hosts)), np.ones(len(hosts))
    for distance in doublings(len(hosts)):
        yield MessageRow(everyone, np.roll(everyone, -distance), whole, 0 * whole)


FORMULAS: dict[str, Callable[[Sequence[Hashable]], Iterator[MessageRow]]] = {
    "hierarchical": _hierarchical,
    "neighbours": _neighbours,
    "to_next": _to_next,
    "to_all": _to_all,
    "around": _around,
}
"""Functions that yield the rounds of all ranks of a pattern: a schedule with many messages, or one
that is none."""


def _in_rows(rounds: Iterable[MessageRow], ranks: int) -> Iterator[MessageRow]:
    """Yield the rows of rounds, in which ranks that had no messages are ahead of others."""
    begun, found = np.zeros(ranks, int), defaultdict[int, list[MessageRow]](list)
    for one in rounds:
        now = np.maximum(*(begun[end] for end in one[:2]))
        numbers = {*now[:1].tolist()} if begun.min() == begun.max() else {*now.tolist()}
        for number in numbers:
            chosen = one if len(numbers) == 1 else MessageRow(*(x[now == number] for x in one))
            found[number].append(chosen)
        for end in one[:2]:
            np.maximum.at(begun, end, now + 1)
    for _, rows in sorted(found.items()):
        several = (np.concatenate(columns) for columns in zip(*rows, strict=True))
        yield rows[0] if len(rows) == 1 else MessageRow(*several)

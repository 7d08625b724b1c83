"""A schedule worked out for arrays of one length: fractions become slices, once and for all.

Long arrays are cut into chunks, each of which goes through the whole schedule by itself: while one
is added up, others are under way, and a tree of many stages is busy in all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pydtnn.comm.schedules.steps import Part, Round, Step, part

CHUNK_BYTES = 2 << 20
"""Length that chunks should have, in B: arrays are cut into as many as come nearest to it.

Between hosts chunks pay: 10 MB over 1 Gbit/s take 4 % longer in one chunk than in five where all
ranks are busy in every round, and 9 % longer on a tree. Inside a host five that take turns are some
10 % faster than one, because they stay in the cache; shorter ones lose that to their messages.
"""


ACTIVE = 4
"""Chunks of one array that are under way at the same time between hosts."""


class Outgoing(NamedTuple):
    """What is sent to a peer: elements `what` of the chunk."""

    peer: int
    what: slice


class Incoming(NamedTuple):
    """What comes from a peer.

    Attributes
    ----------
    peer : int
    where : slice
        Elements of the chunk that it is for.
    lands : slice or None
        Elements of scratch memory that it waits in until the round is over; None for those that
        are received where they belong.
    adds : bool
        Whether it is added to what is there or takes its place.
    """

    peer: int
    where: slice
    lands: slice | None
    adds: bool


class Exchange(NamedTuple):
    """One round of one rank."""

    incoming: tuple[Incoming, ...]
    outgoing: tuple[Outgoing, ...]


class Chunk(NamedTuple):
    """A stretch of the array, what is done with it, and the scratch elements that this takes.

    `number` counts all chunks of the array: a rank may have nothing to do with some.
    """

    number: int
    elements: slice
    exchanges: tuple[Exchange, ...]
    scratch: int


def pieces(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Number of chunks of an array.

    >>> pieces(2_600_000), pieces(10_000_000)
    (1, 5)
    """
    return max(1, round(nbytes / chunk_bytes))


def chunks_under_way(hosts: Sequence[Hashable]) -> int:
    """Number of chunks of one array that are under way at the same time.

    `ACTIVE`, and 1 where all ranks share a host: no other process could move messages while they
    add, and what one chunk leaves in their caches another would drive out.

    >>> chunks_under_way("aab"), chunks_under_way("aaa")
    (4, 1)
    """
    return 1 if len(set(hosts)) == 1 else ACTIVE


def work_out(rounds: Sequence[Round], n: int, chunks: int) -> tuple[Chunk, ...]:
    """Work out what one rank does with an array.

    Parameters
    ----------
    rounds : sequence of Round
        The schedule of this rank.
    n : int
        Elements of the array.
    chunks : int
        Into how many chunks of nearly equal length to cut it.

    Returns
    -------
    tuple of Chunk
        Without chunks for which there is nothing to do.
    """
    known: dict[int, tuple[Exchange, ...]] = {}  # by length: there are two at most
    result = []
    for index in range(chunks):
        elements = part(index, chunks).elements(n)
        length = elements.stop - elements.start
        if length not in known:
            exchanges = (_exchange(steps, length) for steps in rounds)
            known[length] = tuple(one for one in exchanges if one.incoming or one.outgoing)
        if known[length]:
            scratch = max(map(_scratch, known[length]))
            result.append(Chunk(index, elements, known[length], scratch))
    return tuple(result)


def _exchange(steps: Sequence[Step], n: int) -> Exchange:
    """One round on a chunk of `n` elements, without the messages that hold none."""
    outgoing = [
        Outgoing(step.peer, what) for step in steps if (what := _elements(step.send, n)) is not None
    ]
    incoming = [
        (step, where) for step in steps if (where := _elements(step.receive, n)) is not None
    ]
    touched = [what for _, what in outgoing] + [where for _, where in incoming]
    arrivals, scratch = [], 0
    for step, where in incoming:
        lands = None
        # A copy goes straight to its place unless the round sends, or receives, what is there.
        if step.op == "sum" or sum(_overlap(where, other) for other in touched) > 1:
            lands = slice(scratch, scratch + where.stop - where.start)
            scratch = lands.stop
        arrivals.append(Incoming(step.peer, where, lands, step.op == "sum"))
    return Exchange(tuple(arrivals), tuple(outgoing))


def _elements(what: Part | None, n: int) -> slice | None:
    """The elements of a part; None where there are none."""
    if what is None:
        return None
    elements = what.elements(n)
    return elements if elements.start < elements.stop else None


def _overlap(a: slice, b: slice) -> bool:
    return bool(a.start < b.stop and b.start < a.stop)


def _scratch(exchange: Exchange) -> int:
    """Scratch elements that a round takes."""
    return max((one.lands.stop for one in exchange.incoming if one.lands), default=0)

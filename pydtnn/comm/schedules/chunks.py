"""A schedule compiled for arrays of one length: fractions are converted to slices once.

Long arrays are cut into chunks, each of which passes through the whole schedule by itself: while
one chunk is added, others are in transit, and all stages of a deep tree are busy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from pydtnn.comm.schedules.steps import Part, Round, Step, part

CHUNK_BYTES = 2 << 20
"""Target length of chunks, in B: the number of chunks is chosen so that they come nearest to it.

Between hosts chunks are faster: 10 MB over 1 Gbit/s take 4 % longer in one chunk than in five if
all ranks are busy in every round, and 9 % longer on a tree. Inside a host five successive chunks
are about 10 % faster than one, because they stay in the cache; with shorter chunks the cost of the
messages exceeds that gain.
"""


ACTIVE = 4
"""Chunks of one array that are in progress at the same time between hosts."""


class Outgoing(NamedTuple):
    """A message to a peer: elements `what` of the chunk."""

    peer: int
    what: slice


class Incoming(NamedTuple):
    """A message from a peer.

    Attributes
    ----------
    peer : int
    where : slice
        Destination elements of the chunk.
    lands : slice or None
        Elements of scratch memory that hold it until the end of the round; None if it is received
        directly at its destination.
    adds : bool
        Whether it is added to the destination or replaces it.
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
    """A stretch of the array, its rounds, and the number of scratch elements that they need.

    `number` counts all chunks of the array: a rank may not take part in some of them.
    """

    number: int
    elements: slice
    exchanges: tuple[Exchange, ...]
    scratch: int


def pieces(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of chunks of an array.

    >>> pieces(2_600_000), pieces(10_000_000)
    (1, 5)
    """
    return max(1, round(nbytes / chunk_bytes))


def chunks_in_flight(hosts: Sequence[Hashable]) -> int:
    """Return the number of chunks of one array that are in progress at the same time.

    `ACTIVE`, or 1 if all ranks share a host: no other process could transfer messages while they
    add, and the chunks would evict each other from the caches.

    >>> chunks_in_flight("aab"), chunks_in_flight("aaa")
    (4, 1)
    """
    return 1 if len(set(hosts)) == 1 else ACTIVE


def work_out(rounds: Sequence[Round], n: int, chunks: int) -> tuple[Chunk, ...]:
    """Compute the operations of one rank on an array.

    Parameters
    ----------
    rounds : sequence of Round
        The schedule of this rank.
    n : int
        Elements of the array.
    chunks : int
        Number of chunks of nearly equal length to cut it into.

    Returns
    -------
    tuple of Chunk
        The chunks in which the rank takes part.
    """
    known: dict[int, tuple[Exchange, ...]] = {}  # by length: there are at most two
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
    """Return one round on a chunk of `n` elements, without empty messages."""
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
        # A copy is received in place unless the round sends, or receives, the same elements.
        if step.op == "sum" or sum(_overlap(where, other) for other in touched) > 1:
            lands = slice(scratch, scratch + where.stop - where.start)
            scratch = lands.stop
        arrivals.append(Incoming(step.peer, where, lands, step.op == "sum"))
    return Exchange(tuple(arrivals), tuple(outgoing))


def _elements(what: Part | None, n: int) -> slice | None:
    """Return the elements of a part, or None if there are none."""
    if what is None:
        return None
    elements = what.elements(n)
    return elements if elements.start < elements.stop else None


def _overlap(a: slice, b: slice) -> bool:
    return bool(a.start < b.stop and b.start < a.stop)


def _scratch(exchange: Exchange) -> int:
    """Return the number of scratch elements that a round needs."""
    return max((one.lands.stop for one in exchange.incoming if one.lands), default=0)

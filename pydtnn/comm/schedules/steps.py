"""The words that schedules are made of: parts of an array, and what one rank does in a round.

A schedule is a generator. For one rank of a group it yields rounds; a round is what the rank sends
and receives at the same time. In round 3 of a ring, the first being round 0, rank 2 of 4 says::

    send(3, part(2, 4)), receive(1, part(1, 4))

Parts are exact fractions of the array, so schedules neither know its length nor mind if it cannot
be divided: parts of one array meet without gap or overlap, and a part of a part is a part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple


class Part(NamedTuple):
    """The stretch of an array from the fraction `start` to the fraction `stop` of its length."""

    start: Fraction
    stop: Fraction

    def elements(self, n: int) -> slice:
        """Elements of an array of `n`: fractions are rounded down, on all ranks alike."""
        return slice(int(self.start * n), int(self.stop * n))

    def cut(self, index: int, pieces: int) -> Part:
        """Piece `index`, counted modulo `pieces`, of this part cut into equal ones."""
        width = (self.stop - self.start) / pieces
        begin = self.start + width * (index % pieces)
        return Part(begin, begin + width)


ALL = Part(Fraction(0), Fraction(1))
"""The whole array."""


def part(index: int, pieces: int) -> Part:
    """Piece `index`, counted modulo `pieces`, of the whole array.

    >>> part(5, 4).elements(10)
    slice(2, 5, None)
    """
    return ALL.cut(index, pieces)


class Step(NamedTuple):
    """One exchange with one peer.

    Attributes
    ----------
    peer : int
        The other rank.
    send, receive : Part or None
        What goes to the peer, what comes from it.
    op : {"sum", "copy"}
        Whether what comes is added to what is there or takes its place.
    """

    peer: int
    send: Part | None
    receive: Part | None
    op: str


Round = tuple[Step, ...]
"""What a rank does at the same time.

What it sends are the values from before the round. What it adds is added when its sends are
complete, in the order of the steps; so a part may be sent and added to in one round, but not be
sent and copied over. The round of a rank ends when its sends and receives are complete. Ranks wait
for each other only by receiving and by sending to one that does not receive yet; the first message
from one rank to another meets the first receive there, the second the second, and so on. A rank
may yield an empty round, which means nothing.
"""


def send(to: int, what: Part) -> Step:
    """Send a part."""
    return Step(to, what, None, "copy")


def receive(source: int, what: Part) -> Step:
    """Receive a part that takes the place of what is there."""
    return Step(source, None, what, "copy")


def add(source: int, what: Part) -> Step:
    """Receive a part and add it to what is there."""
    return Step(source, None, what, "sum")


class Group(NamedTuple):
    """The ranks that carry out a schedule, seen from one of them.

    Attributes
    ----------
    rank : int
        The one that asks, from 0.
    hosts : tuple of hashable
        What names the host of each rank.
    """

    rank: int
    hosts: Sequence[Hashable]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def by_host(self) -> list[list[int]]:
        """The ranks of each host, hosts in the order of their first ranks."""
        return [
            [rank for rank in range(self.size) if self.hosts[rank] == host]
            for host in dict.fromkeys(self.hosts)
        ]


Rounds = Iterator[Round]
"""What a schedule yields for one rank."""

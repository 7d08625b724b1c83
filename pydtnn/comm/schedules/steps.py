"""Elements of schedules: parts of an array, and the sends and receives of one rank in a round.

A schedule is a generator. For one rank of a group it yields rounds; a round contains the messages
that the rank sends and receives at the same time. In round 3 of a ring, the first being round 0,
rank 2 of 4 yields::

    send(3, part(2, 4)), receive(1, part(1, 4))

Parts are exact fractions of the array, so schedules are independent of its length and of whether
it is divisible: the parts of an array cover it without gap or overlap, and a part of a part is a
part.
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
        """Return the elements of an array of `n`; fractions are rounded down on all ranks."""
        return slice(int(self.start * n), int(self.stop * n))

    def cut(self, index: int, pieces: int) -> Part:
        """Return piece `index`, modulo `pieces`, of this part cut into `pieces` equal ones."""
        width = (self.stop - self.start) / pieces
        begin = self.start + width * (index % pieces)
        return Part(begin, begin + width)


ALL = Part(Fraction(0), Fraction(1))
"""The whole array."""


def part(index: int, pieces: int) -> Part:
    """Return piece `index`, modulo `pieces`, of the whole array.

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
        The part sent to the peer, and the part received from it.
    op : {"sum", "copy"}
        Whether the received values are added to the existing ones or replace them.
    """

    peer: int
    send: Part | None
    receive: Part | None
    op: str


Round = tuple[Step, ...]
"""The messages of a rank at the same time.

The values sent are those from before the round. Received values are added when the sends of the
rank are complete, in the order of the steps; so a part may be sent and added to in one round, but
not sent and copied over. The round of a rank ends when its sends and receives are complete. Ranks
wait for each other only by receiving, and by sending to a rank that does not receive yet; the k-th
message from one rank to another matches the k-th receive there. A rank may yield an empty round,
which has no effect.
"""


def send(to: int, what: Part) -> Step:
    """Send a part."""
    return Step(to, what, None, "copy")


def receive(source: int, what: Part) -> Step:
    """Receive a part that replaces the existing values."""
    return Step(source, None, what, "copy")


def add(source: int, what: Part) -> Step:
    """Receive a part and add it to the existing values."""
    return Step(source, None, what, "sum")


class Group(NamedTuple):
    """The ranks that carry out a schedule, and the rank that the schedule is for.

    Attributes
    ----------
    rank : int
        The rank whose rounds are generated, from 0.
    hosts : tuple of hashable
        Identifier of the host of each rank.
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
        ranks: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return [*ranks.values()]


Rounds = Iterator[Round]
"""The type of a schedule's iterator of the rounds of one rank."""

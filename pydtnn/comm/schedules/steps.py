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

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import wraps
from itertools import chain, zip_longest
from typing import NamedTuple


class Part(NamedTuple):
    """The part of an array from the fraction `start` to the fraction `stop` of its length."""

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


class MessageStep(NamedTuple):
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


Round = tuple[MessageStep, ...]
"""The messages of a rank at the same time.

The values sent are those from before the round. Received values are added when the sends of the
rank are complete, in the order of the steps; so a part may be sent and added to in one round, but
not sent and copied over. The round of a rank ends when its sends and receives are complete. Ranks
wait for each other only by receiving, and by sending to a rank that does not receive yet; the k-th
message from one rank to another matches the k-th receive there. A rank may yield an empty round,
which has no effect.
"""


def send(to: int, what: Part) -> MessageStep:
    """Send a part."""
    return MessageStep(to, what, None, "copy")


def receive(source: int, what: Part) -> MessageStep:
    """Receive a part that replaces the existing values."""
    return MessageStep(source, None, what, "copy")


def add(source: int, what: Part) -> MessageStep:
    """Receive a part and add it to the existing values."""
    return MessageStep(source, None, what, "sum")


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


Algorithm = Callable[[Group], Rounds]
"""A function that yields the rounds of one rank."""


def over(group: Group, members: Sequence[int], algorithm: Algorithm, what: Part = ALL) -> Rounds:
    """Carry out `algorithm` among a subset of the ranks, on one part of the array.

    Parameters
    ----------
    group : Group
        The group whose rank numbers are used in `members` and in the yielded rounds.
    members : sequence of int
        Participating ranks; the index in this sequence is the rank within `algorithm`.
    algorithm : Algorithm
        The schedule among the members.
    what : Part, default ALL
        The part that `algorithm` treats as the whole array.

    Yields
    ------
    Round
        No rounds for a rank that is not a member.
    """
    if group.rank not in members:
        return
    seen = Group(members.index(group.rank), [group.hosts[member] for member in members])
    for steps in algorithm(seen):
        yield tuple(
            MessageStep(members[peer], _within(what, out), _within(what, into), op)
            for peer, out, into, op in steps
        )


def together(*schedules: Iterable[Round]) -> Rounds:
    """Carry out several schedules concurrently: their first rounds as one round, and so on."""
    for rounds in zip_longest(*schedules, fillvalue=()):
        yield tuple(chain(*rounds))


def back(rounds: Sequence[Round]) -> Rounds:
    """Reverse rounds: the results are returned along the messages of the sums, last round first.

    This converts a reduction to one rank into a broadcast from it, and a reduce-scatter into the
    corresponding allgather.

    References
    ----------
    Chan, Heimlich, Purkayastha, van de Geijn, Collective communication: theory, practice, and
    experience, 2007: dual operations have mirrored algorithms.
    """
    for steps in reversed(rounds):
        yield tuple(MessageStep(step.peer, step.receive, step.send, "copy") for step in steps)


def fold(algorithm: Algorithm) -> Algorithm:
    """Extend an algorithm for 2^k ranks to any number of ranks.

    Of P = 2^k + e ranks, the odd ones among the first 2e send their array to their left neighbour,
    do not take part in `algorithm`, and receive the result. That takes 2 more rounds, and n more
    bytes from each of these ranks.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH,
    2005.
    """

    @wraps(algorithm)
    def folded(group: Group) -> Rounds:
        extra = group.size - power_of_two(group.size)
        guests = range(1, 2 * extra, 2)
        if group.rank in guests:
            yield (send(group.rank - 1, ALL),)
            yield (receive(group.rank - 1, ALL),)
            return
        host = group.rank + 1 in guests
        if host:
            yield (add(group.rank + 1, ALL),)
        members = [rank for rank in range(group.size) if rank not in guests]
        yield from over(group, members, algorithm)
        if host:
            yield (send(group.rank + 1, ALL),)

    return folded


def doublings(size: int) -> Iterator[int]:
    """Yield the distances 1, 2, 4, ... below `size`.

    >>> list(doublings(8))
    [1, 2, 4]
    """
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


def power_of_two(size: int) -> int:
    """Return the largest power of two that is at most `size`.

    >>> power_of_two(11)
    8
    """
    return 1 << (size.bit_length() - 1)


def halved(rank: int, ranks: int) -> Part:
    """Return the part that a rank keeps when `ranks`, a power of two, halve the array recursively.

    First between neighbours, where the even rank keeps the first half; then between ranks at
    distance 2, 4 and so on, each pair halving the part that both still hold.

    >>> halved(2, 4)  # rank 2 is even, so in the first half; of that it keeps the second
    Part(start=Fraction(1, 4), stop=Fraction(1, 2))
    """
    what = ALL
    for distance in doublings(ranks):
        what = what.cut(rank // distance, 2)
    return what


def _within(whole: Part, inner: Part | None) -> Part | None:
    """Return the part of the array that corresponds to `inner` relative to `whole`."""
    if inner is None:
        return None
    width: Fraction = whole.stop - whole.start
    return Part(whole.start + inner.start * width, whole.start + inner.stop * width)

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

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, wraps
from heapq import heappop, heappush
from itertools import chain, pairwise, zip_longest
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


# Matching of sends and receives, and the order in which the rounds of all ranks begin and end.
#
# Shared by the checker and the drawing: the rounds of one rank contain no information about those
# of other ranks until they are combined here.

Plan = Sequence[Sequence[Round]]
"""The rounds of every rank, rank by rank."""

Place = tuple[int, int]
"""A rank, and the number of one of its rounds."""


class ScheduleError(ValueError):
    """A schedule that cannot give every rank the sum; the text names the round and the ranks."""


class Message(NamedTuple):
    """A message from one rank to another.

    Attributes
    ----------
    sender, sent : int
        The sending rank, and the number of its round.
    receiver, received : int
        The receiving rank, and the number of its round.
    part : Part
        The part that is sent.
    op : {"sum", "copy"}
        The operation of the receiver.
    row : int
        When it can be transferred: in row 0 if it depends on no other message, in row 1 if it
        depends on some of row 0, and so on. A row is a round of all ranks.
    """

    sender: int
    sent: int
    receiver: int
    received: int
    part: Part
    op: str
    row: int = 0


class Event(NamedTuple):
    """The beginning or end of a round of a rank, before the messages of `row`."""

    row: int
    rank: int
    round: int
    begins: bool


@dataclass(frozen=True)
class Timeline:
    """A plan with all messages matched and all events ordered.

    Attributes
    ----------
    events : list of Event
        Every beginning and end of a round, each after all events that it depends on.
    messages : list of Message
        All messages, ordered by receiver, its rounds, and the steps in a round.
    """

    events: list[Event]
    messages: list[Message]

    @cached_property
    def chunks(self) -> list[Part]:
        """The pieces between all ends of parts: a message contains all of a piece or nothing."""
        ends = {*ALL, *(end for message in self.messages for end in message.part)}
        return [Part(*pair) for pair in pairwise(sorted(ends))]

    @cached_property
    def rows(self) -> int:
        """Length of the longest chain of dependent messages: the rounds of all ranks together."""
        return max((message.row + 1 for message in self.messages), default=0)


def show(part: Part) -> str:
    """Format a part as a half-open interval.

    >>> from pydtnn.comm.schedules.steps import part
    >>> show(part(1, 4))
    '[1/4, 1/2)'
    """
    return f"[{part.start}, {part.stop})"


def match(plan: Plan) -> list[Message]:
    """Pair the k-th send from one rank to another with the k-th receive there.

    Returns
    -------
    list of Message
        Ordered by receiver, its rounds, and the steps in a round.

    Raises
    ------
    ScheduleError
        If a send or a receive has no match, or two that match specify different parts.
    """
    sends: dict[tuple[int, int], deque[tuple[int, Part]]] = defaultdict(deque)
    for rank, rounds in enumerate(plan):
        for k, steps in enumerate(rounds):
            for step in steps:
                if step.send is not None:
                    sends[rank, step.peer].append((k, step.send))
    messages = []
    for rank, rounds in enumerate(plan):
        for k, steps in enumerate(rounds):
            for step in steps:
                if step.receive is not None:
                    waiting = sends[step.peer, rank]
                    if not waiting:
                        raise ScheduleError(
                            f"round {k} of rank {rank} receives {show(step.receive)} from rank "
                            f"{step.peer}, which sends no further message; add the send, or "
                            "remove this step."
                        )
                    sent, part = waiting.popleft()
                    if part != step.receive:
                        raise ScheduleError(
                            f"round {sent} of rank {step.peer} sends {show(part)} to rank {rank}, "
                            f"whose round {k} expects {show(step.receive)}; use the same part in "
                            "both."
                        )
                    messages.append(Message(step.peer, sent, rank, k, part, step.op))
    for (rank, peer), waiting in sends.items():
        if waiting:
            k, part = waiting[0]
            raise ScheduleError(
                f"round {k} of rank {rank} sends {show(part)} to rank {peer}, which does not "
                "receive it; add the receive, or remove this step."
            )
    return messages


def timeline(plan: Plan) -> Timeline:
    """Carry out the rounds of every rank, each waiting only for the ranks it communicates with.

    A round ends when each rank that it sends to or receives from has begun the round to which that
    message belongs: no buffering is assumed.

    Raises
    ------
    ScheduleError
        As `match`; and if ranks would deadlock.
    """
    messages = match(plan)
    peers: dict[Place, dict[Place, None]] = defaultdict(dict)
    for message in messages:
        here, there = _ends(message)
        peers[here][there] = peers[there][here] = None
    talk = {place: list(found) for place, found in peers.items()}

    events: list[Event] = []
    begun: dict[Place, int] = {}  # the row in which a round of a rank begins
    # Of a round and those of its peers: the number not begun, and the last row of the others
    absent = {place: 1 + len(found) for place, found in talk.items()}
    latest: dict[Place, int] = defaultdict(int)
    current = [-1] * len(plan)  # the current round of each rank
    complete: list[tuple[int, int]] = []  # (row, rank) of the rounds that can end, as a heap

    def begin(rank: int, row: int) -> None:
        current[rank] += 1
        here = rank, current[rank]
        if current[rank] == len(plan[rank]):
            return
        begun[here] = row
        events.append(Event(row, *here, begins=True))
        if here not in talk:
            heappush(complete, (row, rank))
            return
        for place in (here, *talk[here]):
            absent[place] -= 1
            latest[place] = max(latest[place], row)
            if not absent[place]:
                heappush(complete, (latest[place] + 1, place[0]))

    for rank in range(len(plan)):
        begin(rank, 0)
    while complete:
        row, rank = heappop(complete)
        events.append(Event(row, rank, current[rank], begins=False))
        begin(rank, row)
    for rank, rounds in enumerate(plan):
        if current[rank] < len(rounds):
            raise ScheduleError(_deadlock(rank, current, talk, begun))
    rows = [max(begun[place] for place in _ends(message)) for message in messages]
    return Timeline(events, [m._replace(row=row) for m, row in zip(messages, rows, strict=True)])


def _ends(message: Message) -> tuple[Place, Place]:
    return (message.sender, message.sent), (message.receiver, message.received)


def _deadlock(
    rank: int,
    current: list[int],
    talk: dict[Place, list[Place]],
    begun: dict[Place, int],
) -> str:
    """Describe the ranks that wait for each other: follow the waits of `rank` to a cycle."""
    waits: dict[int, str] = {}
    while rank not in waits:
        here = rank, current[rank]
        peer, k = next(there for there in talk[here] if there not in begun)
        waits[rank] = f"round {here[1]} of rank {rank} waits for round {k} of rank {peer}"
        rank = peer
    circle = [*waits.values()][[*waits].index(rank) :]
    return f"deadlock: {', '.join(circle)}; send and receive in the same round."


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
            Step(members[peer], _within(what, out), _within(what, into), op)
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
        yield tuple(_returned(step) for step in steps)


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


def _returned(step: Step) -> Step:
    """Return the reverse of a step: receive what was sent, send what was received."""
    return Step(step.peer, step.receive, step.send, "copy")


# A schedule compiled for arrays of one length: fractions are converted to slices once.
#
# Long arrays are cut into chunks, each of which passes through the whole schedule by itself: while
# one chunk is added, others are in transit, and all stages of a deep tree are busy.

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
    """A part of the array, its rounds, and the number of scratch elements that they need.

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

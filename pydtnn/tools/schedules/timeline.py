"""Matching of sends and receives, and the order in which the rounds of all ranks begin and end.

Shared by the check and the drawing: the rounds of one rank contain no information about those of
other ranks until they are combined here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from pydtnn.comm.schedules.steps import ALL, Part, Round

Plan = Sequence[Sequence[Round]]
"""The rounds of every rank, rank by rank."""

Place = tuple[int, int]
"""A rank, and the number of one of its rounds."""


class ScheduleError(ValueError):
    """A schedule that cannot give every rank the sum; the text names the round and the ranks."""


class PlanMessage(NamedTuple):
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


class RoundEvent(NamedTuple):
    """The beginning or end of a round of a rank, before the messages of `row`."""

    row: int
    rank: int
    round: int
    begins: bool


@dataclass(frozen=True)
class MatchedPlan:
    """A plan with all messages matched and all events ordered.

    Attributes
    ----------
    events : list of Event
        Every beginning and end of a round, each after all events that it depends on.
    messages : list of Message
        All messages, ordered by receiver, its rounds, and the steps in a round.
    """

    events: list[RoundEvent]
    messages: list[PlanMessage]

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


def match(plan: Plan) -> list[PlanMessage]:
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
                    messages.append(PlanMessage(step.peer, sent, rank, k, part, step.op))
    for (rank, peer), waiting in sends.items():
        if waiting:
            k, part = waiting[0]
            raise ScheduleError(
                f"round {k} of rank {rank} sends {show(part)} to rank {peer}, which does not "
                "receive it; add the receive, or remove this step."
            )
    return messages


def timeline(plan: Plan) -> MatchedPlan:
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

    events: list[RoundEvent] = []
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
        events.append(RoundEvent(row, *here, begins=True))
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
        events.append(RoundEvent(row, rank, current[rank], begins=False))
        begin(rank, row)
    for rank, rounds in enumerate(plan):
        if current[rank] < len(rounds):
            raise ScheduleError(_deadlock(rank, current, talk, begun))
    rows = [max(begun[place] for place in _ends(message)) for message in messages]
    return MatchedPlan(events, [m._replace(row=row) for m, row in zip(messages, rows, strict=True)])


def _ends(message: PlanMessage) -> tuple[Place, Place]:
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

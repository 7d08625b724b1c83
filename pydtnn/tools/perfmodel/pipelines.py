"""The actions of a pipeline with the messages between its stages, which share links.

Actions are followed in the order of time. A message begins when both sides are posted: receives are
posted before the action that needs the first of them. It shares the memory of a host, or network
cards, equally with other messages for as long as both are in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from pydtnn.model.pipeline.check import Plan, TimedAction, Timetable, source_of
from pydtnn.model.pipeline.schedules import Action, Owners
from pydtnn.tools.perfmodel.overlap import InTransit
from pydtnn.training.pipeline import RECEIVES_AHEAD


class StageMessage(NamedTuple):
    """What a message between two stages needs.

    Attributes
    ----------
    latency : float
        In s.
    arrays : tuple of (float, float)
        Of each array, the time of its transfer, and the part of it for which its links are busy, in
        s.
    links : tuple of hashable
        Those that other messages of the pipeline may use.
    copied : float
        Time for which the processor of either rank copies it, in s.
    piece : float
        Part of it that is copied after its arrival.
    posting : float
        Time between the first and the last call that posts it, in s.
    """

    latency: float
    arrays: tuple[tuple[float, float], ...]
    links: tuple[Hashable, ...]
    copied: float = 0.0
    piece: float = 0.0
    posting: float = 0.0

    @property
    def busy(self) -> float:
        """Time of the message alone, in s."""
        alone = max((alone for alone, _ in self.arrays), default=0.0)
        return self.latency + max(alone, sum(shared for _, shared in self.arrays))


@dataclass(eq=False)
class _Message:
    key: tuple[int, int, int]
    sender: int
    receiver: int
    needs: StageMessage
    arrays: list[InTransit] = field(default_factory=list)

    @property
    def arrival(self) -> float:
        return max(one.arrival for one in self.arrays)


class PipelineClock:
    """The ranks of a pipeline, and the messages in progress.

    Parameters
    ----------
    plan : sequence of sequences of Action
        The actions of each rank.
    owners : Owners
    seconds : callable
        Returns the time of an action of a rank that begins at a time, with its calls, in s.
    call : callable
        Returns the time of the calls for the message that an action of a rank waits for, in s.
    message : callable
        Returns the message of an action, from one rank to another.
    begins : sequence of float
        When each rank begins, in s.
    links : dict of hashable to list of InTransit
        The messages in transit of each link, those of others included; missing ones are added.
    """

    def __init__(
        self,
        plan: Plan,
        owners: Owners,
        seconds: Callable[[int, Action, float], float],
        call: Callable[[int, Action], float],
        message: Callable[[Action, int, int], StageMessage],
        begins: Sequence[float],
        links: dict[Hashable, list[InTransit]],
    ) -> None:
        self.plan, self.owners = plan, owners
        self.seconds, self.call, self.message = seconds, call, message
        self._links = links
        self.now, self.position = [*begins], [0] * len(plan)
        self.events: list[TimedAction] = []
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        awaited = [[a for a in own if source_of(a, owners.stages) is not None] for own in plan]
        self._awaited = [iter(own) for own in awaited]
        self._posted: set[tuple[int, int, int]] = set()
        self._sent: dict[tuple[int, int, int], _Message] = {}  # without a receive
        self._arrived: dict[tuple[int, int, int], float] = {}
        self._copies = [[0.0, 0.0] for _ in plan]  # of each rank: all, and the last pieces

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Call a function at a time."""
        heappush(self._heap, (time, next(self._number), action))

    def run(self) -> Timetable:
        """Carry out all actions, each when its message has arrived."""
        for rank, begin in enumerate(self.now):
            self.at(begin, lambda now, rank=rank: self._begin(rank, now))  # type: ignore[misc]
        while self._heap:
            now, _, action = heappop(self._heap)
            action(now)
        events = sorted(self.events, key=lambda event: (event.begin, event.rank))
        numbers = {event.action.micro_batch for event in events}
        return Timetable(tuple(events), self.owners, len(numbers))

    def _begin(self, rank: int, now: float) -> None:
        for _ in range(RECEIVES_AHEAD):
            now = self._post(rank, now)
        self.now[rank] = now
        self.at(now, lambda now: self._proceed(rank, now))

    def _post(self, rank: int, now: float) -> float:
        """Post the next receive of a rank; return the time afterwards."""
        if (action := next(self._awaited[rank], None)) is None:
            return now
        key = _key_of(action)
        self._posted.add(key)
        now += self.call(rank, action)
        if (message := self._sent.pop(key, None)) is not None:
            self.at(now - message.needs.posting, lambda now: self._start(message, now))
        return now

    def _start(self, message: _Message, now: float) -> None:
        needs = message.needs
        links = [self._links[link] for link in needs.links]
        for alone, shared in needs.arrays or [(0.0, 0.0)]:
            message.arrays.append(InTransit())
            message.arrays[-1].begin(now, needs.latency, alone, shared, links)
        self.at(message.arrival, lambda now: self._arrive(message, now))

    def _arrive(self, message: _Message, now: float) -> None:
        if message.arrival > now:  # others have begun meanwhile
            self.at(message.arrival, lambda now: self._arrive(message, now))
            return
        self._arrived[message.key] = now
        for rank in (message.sender, message.receiver):
            copies = self._copies[rank]
            copies[0] += message.needs.copied
            copies[1] += message.needs.piece
        self._proceed(message.receiver, now)

    def _proceed(self, rank: int, now: float) -> None:
        """Begin the next action of a rank if its message has arrived."""
        if self.now[rank] > now or self.position[rank] == len(self.plan[rank]):
            return
        action = self.plan[rank][self.position[rank]]
        receives = source_of(action, self.owners.stages) is not None
        if receives and _key_of(action) not in self._arrived:
            return  # it is called again when the message has
        copies = self._copies[rank]
        hidden = min(now - self.now[rank], copies[0] - copies[1])
        begin = now + copies[0] - hidden
        if receives:
            begin = self._post(rank, begin)
        copies[:] = [0.0, 0.0]
        self.position[rank] += 1
        self.now[rank] = end = begin + self.seconds(rank, action, begin)
        self.events.append(TimedAction(rank, action, begin, end))
        self.at(end, lambda now: self._proceed(rank, now))
        to = action.stage + action.direction
        if action.direction and 0 <= to < self.owners.stages:
            receiver = self.owners.of(to, action.micro_batch)
            key = to, action.direction, action.micro_batch
            if receiver == rank:
                self._arrived[key] = end
            else:
                needs = self.message(action, rank, receiver)
                message = _Message(key, rank, receiver, needs)
                self.at(end - needs.posting, lambda now: self._send(message, now))

    def _send(self, message: _Message, now: float) -> None:
        if message.key in self._posted:
            self._start(message, now)
        else:
            self._sent[message.key] = message


def _key_of(action: Action) -> tuple[int, int, int]:
    return action.stage, action.direction, action.micro_batch

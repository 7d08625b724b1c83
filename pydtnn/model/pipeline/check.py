"""Verification of pipeline schedules; errors specify the stage and the action.

Nothing is computed: the actions of all ranks are carried out together, with messages that arrive
when the sending action has ended. A proof holds for stages and messages of any speed, because
actions only wait for messages, each of which has a tag of its own, and sends do not block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pydtnn.model.pipeline.schedules import (
    KINDS,
    LAST,
    Action,
    Owners,
    PipelineError,
    Schedule,
    actions_of,
    owners_of,
    with_stages,
)
from pydtnn.utils.validate import check_int

Plan = Sequence[Sequence[Action]]
"""The actions of every rank."""


HALVES = ("backward_inputs", "backward_parameters")
"""Kinds of the halves of backward, in their order."""


class TimedAction(NamedTuple):
    """An action of a rank, and the times at which it begins and ends."""

    rank: int
    action: Action
    begin: float
    end: float


class StageTime(NamedTuple):
    """Times of a stage for one micro-batch.

    Attributes
    ----------
    forward, backward : float
    ahead, back : float
        Of the messages to the stage after and to the stage before.
    parameters : float, optional
        Part of `backward` in which the gradients of parameters are computed; by default a half.
    """

    forward: float
    backward: float
    ahead: float = 0.0
    back: float = 0.0
    parameters: float | None = None

    def of(self, action: Action) -> float:
        """Return the time of an action."""
        if action.kind in ("forward", "backward"):
            return self.forward if action.kind == "forward" else self.backward
        later = self.backward / 2 if self.parameters is None else self.parameters
        return later if action.kind == "backward_parameters" else self.backward - later

    def message(self, action: Action) -> float:
        """Return the time of the message that an action sends."""
        return self.ahead if action.kind == "forward" else self.back


@dataclass(frozen=True)
class Timetable:
    """A verified schedule with the time of every action.

    Attributes
    ----------
    events : tuple of Event
        In the order in which they begin.
    owners : Owners
        The ranks of the stages.
    micro_batches : int
    """

    events: tuple[TimedAction, ...]
    owners: Owners
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.owners.stages

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 1 + max(map(max, self.owners.paths))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of one rank, in order."""
        return self.owners.stages_of(rank)

    def of(self, rank: int) -> list[TimedAction]:
        """Return the events of one rank."""
        return [event for event in self.events if event.rank == rank]

    @cached_property
    def duration(self) -> float:
        """Time at which the last action ends."""
        return max(event.end for event in self.events)

    @cached_property
    def bubble(self) -> float:
        """Fraction of the time, over all ranks, in which a rank computes nothing."""
        busy = sum(event.end - event.begin for event in self.events)
        return 1 - busy / (self.ranks * self.duration)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """For each rank, the time at which its last action ends."""
        found = dict.fromkeys(range(self.ranks), 0.0)
        found |= {event.rank: event.end for event in self.events}
        return tuple(found.values())

    @cached_property
    def waiting(self) -> float:
        """The most time for which a rank waits between its first and its last action.

        The bubble of papers in which a rank begins the next step before others have ended this one.
        """
        own = [self.of(rank) for rank in range(self.ranks)]
        return max(
            events[-1].end - events[0].begin - sum(e.end - e.begin for e in events)
            for events in filter(None, own)
        )

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """For each rank, the most micro-batches whose values it keeps, see `max_in_flight`."""
        return tuple(max_in_flight([e.action for e in self.of(rank)]) for rank in range(self.ranks))

    @cached_property
    def has_halves(self) -> bool:
        """Whether a stage computes backward in two halves."""
        return any(event.action.kind in HALVES for event in self.events)


def max_in_flight(actions: Sequence[Action]) -> float:
    """Return the most micro-batches of a rank between their forward and the end of their backward.

    Of v stages, each counts 1 / v: the result is in values of all layers of the rank.
    """
    return _max_between(actions, ("forward",), LAST)


def max_halved(actions: Sequence[Action]) -> float:
    """Return the most micro-batches of a rank between the two halves of their backward.

    Counted as by `max_in_flight`; 0 without halves.
    """
    return _max_between(actions, HALVES[:1], HALVES[1:])


def _max_between(actions: Sequence[Action], begin: Sequence[str], end: Sequence[str]) -> float:
    """Return the most micro-batches between actions of some kinds and of others."""
    now = most = 0
    for action in actions:
        now += (action.kind in begin) - (action.kind in end)
        most = max(most, now)
    return most / (len({action.stage for action in actions}) or 1)


def check(
    schedule: str | Schedule | Plan,
    ranks: int = 0,
    micro_batches: int = 0,
    *,
    steps: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    parameters: float | None = None,
) -> Timetable:
    """Prove that a schedule computes a step, for one number of ranks and micro-batches.

    Every stage is on one rank, or on several for different micro-batches. It computes each of these
    once forward and, after that, once backward, in one piece or first the gradients of inputs and
    then those of parameters; and there is no deadlock: every action's message is sent by an action
    that can be carried out before.

    Parameters
    ----------
    schedule : str, Schedule or sequence of sequences of Action
        A name of `PIPELINE_SCHEDULES`, a function, or the actions of all ranks.
    ranks, micro_batches : int
        Of a name or function; if actions are given, they are counted.
    steps : int
        Consecutive steps of a name or function, which are one if the schedule is asynchronous.
    forward, backward, parameters
        Times of a stage, see `StageTime`.

    Returns
    -------
    Timeline

    Raises
    ------
    PipelineError
        At the first error found, in one sentence.

    >>> from pydtnn.model.pipeline.schedules import backward, forward
    >>> check([[forward(0), backward(0)], [backward(0), forward(0)]])
    Traceback (most recent call last):
    ...
    pydtnn.model.pipeline.schedules.PipelineError: stage 1 has backward 0 before forward 0; ...
    """
    plan = plan_of(schedule, ranks, micro_batches, steps)
    numbers = range(1 + max((a.micro_batch for actions in plan for a in actions), default=0))
    if not isinstance(schedule, str) and not callable(schedule):
        micro_batches = len(numbers)
    micro_batches *= steps
    stages = owners_of(plan).stages
    for stage in range(stages):
        own = [a for actions in plan for a in actions if a.stage == stage]
        _check_stage(stage, own, micro_batches)
    each = StageTime(forward, backward, parameters=parameters)
    return carry_out(plan, lambda action: each)


def steady_bubble(
    schedule: str | Schedule, ranks: int, micro_batches: int, **times: float
) -> float:
    """Return the fraction of a further step, after two, in which a rank computes nothing.

    Parameters are those of `check`.

    >>> [round(steady_bubble(name, 4, 8), 3) for name in ("1f1b", "2bw")]
    [0.273, 0.0]
    """
    two, three = (check(schedule, ranks, micro_batches, steps=n, **times) for n in (2, 3))
    busy = sum(event.end - event.begin for event in three.events) / 3
    return 1 - busy / (ranks * (three.duration - two.duration))


def plan_of(
    schedule: str | Schedule | Plan, ranks: int, micro_batches: int, steps: int = 1
) -> Plan:
    """List the actions of every rank; parameters as for `check`."""
    if not isinstance(schedule, str) and not callable(schedule):
        return [with_stages(actions, rank) for rank, actions in enumerate(schedule)]
    check_int("check", "ranks", ranks, at_least=1)
    check_int("check", "micro_batches", micro_batches, at_least=1)
    return [actions_of(schedule, rank, ranks, micro_batches, steps) for rank in range(ranks)]


def _check_stage(stage: int, actions: Sequence[Action], micro_batches: int) -> None:
    """Raise PipelineError if a micro-batch is not computed once forward and then once backward."""
    times = Counter(actions)
    for action, count in times.items():
        if not 0 <= action.micro_batch < micro_batches:
            raise PipelineError(
                f"stage {stage} has {action}, but micro-batches are 0 to {micro_batches - 1}; "
                "remove it"
            )
        if count > 1:
            raise PipelineError(f"stage {stage} has {action} {count} times; keep one")
    halves = any(action.kind in HALVES for action in actions)
    if halves and (whole := next((a for a in actions if a.kind == "backward"), None)):
        raise PipelineError(
            f"stage {stage} has {whole} in one piece, and others in two halves; use one or the "
            "other for all micro-batches"
        )
    kinds = ("forward", *(HALVES if halves else ("backward",)))
    for number in range(micro_batches):
        needed = [Action(kind, number, stage) for kind in kinds]
        for action in needed:
            if action not in times:
                raise PipelineError(f"stage {stage} lacks {action}; add it")
        for before, after in pairwise(needed):
            if actions.index(after) < actions.index(before):
                raise PipelineError(f"stage {stage} has {after} before {before}; swap them")


def source_of(action: Action, stages: int) -> int | None:
    """Return the stage whose message an action waits for; None if it waits for none."""
    source = action.stage - action.direction
    return source if action.direction and 0 <= source < stages else None


def carry_out(plan: Plan, time: Callable[[Action], StageTime]) -> Timetable:
    """Carry out the actions of all ranks, each as soon as its message has arrived.

    Messages do not delay the rank that sends them, and take no time between stages of one rank.
    Those of a rank pass its link one after the other.

    Parameters
    ----------
    plan : sequence of sequences of Action
        The actions of every rank.
    time : callable
        Returns the times of an action's stage for its micro-batch.

    Raises
    ------
    PipelineError
        If the ranks deadlock.

    >>> from pydtnn.model.pipeline.check import plan_of
    >>> carry_out(plan_of("gpipe", 2, 2), lambda action: StageTime(1.0, 2.0)).ends
    (9.0, 7.0)
    """
    owners = owners_of(plan)
    arrivals: dict[tuple[int, int, int], float] = {}  # of a direction and micro-batch, at a stage
    events: list[TimedAction] = []
    position, now, free = [0] * len(plan), [0.0] * len(plan), [0.0] * len(plan)
    last = owners.stages - 1
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(plan):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                kind, number, stage = action
                way = KINDS[kind]
                arrival = arrivals.get((stage, way, number)) if way else 0.0
                if arrival is None:
                    if 0 <= stage - way <= last:
                        break
                    arrival = 0.0
                begin, own = max(now[rank], arrival), time(action)
                now[rank] = end = begin + own.of(action)
                events.append(TimedAction(rank, action, begin, end))
                to = stage + way
                if way and 0 <= to <= last:
                    sent = end
                    if owners.of(to, number) != rank:
                        sent = max(end, free[rank]) + own.message(action)
                        free[rank] = sent
                    arrivals[to, way, number] = sent
                position[rank] += 1
                progress = True
    waiting = [
        f"stage {actions[place].stage} waits in {actions[place]} for stage "
        f"{source_of(actions[place], owners.stages)}"
        for actions, place in zip(plan, position, strict=True)
        if place < len(actions)
    ]
    if waiting:
        raise PipelineError(f"the stages deadlock: {', '.join(waiting)}; change their order")
    events.sort(key=lambda event: (event.begin, event.rank))
    numbers = {event.action.micro_batch for event in events}
    return Timetable(tuple(events), owners, len(numbers))

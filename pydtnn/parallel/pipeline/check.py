"""Verification of pipeline schedules; errors specify the stage and the action.

Nothing is computed: the actions of all stages are carried out together, with messages that arrive
when the sending action has ended. A proof holds for stages and messages of any speed, because
actions only wait for messages, each of which has a tag of its own, and sends do not block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydtnn.parallel.pipeline.schedules import Action, Schedule, actions_of
from pydtnn.utils.validate import check_int

Plan = Sequence[Sequence[Action]]
"""The actions of every stage."""


class PipelineError(ValueError):
    """A schedule that does not compute a step; the text names the stage and the action."""


class Event(NamedTuple):
    """An action of a stage, and the times at which it begins and ends."""

    stage: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A verified schedule with the time of every action.

    Attributes
    ----------
    events : tuple of Event
        In the order in which they begin.
    stages, micro_batches : int
    """

    events: tuple[Event, ...]
    stages: int
    micro_batches: int

    def of(self, stage: int) -> list[Event]:
        """Return the events of one stage."""
        return [event for event in self.events if event.stage == stage]

    @cached_property
    def duration(self) -> float:
        """Time at which the last action ends."""
        return max(event.end for event in self.events)

    @cached_property
    def bubble(self) -> float:
        """Fraction of the time, over all stages, in which a stage computes nothing."""
        busy = sum(event.end - event.begin for event in self.events)
        return 1 - busy / (self.stages * self.duration)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most micro-batches whose values it keeps at a time."""
        return tuple(
            most_in_flight([e.action for e in self.of(stage)]) for stage in range(self.stages)
        )

    @cached_property
    def messages(self) -> int:
        """Number of times that values or gradients are sent from a stage to a neighbour."""
        return 2 * (self.stages - 1) * self.micro_batches


def most_in_flight(actions: Sequence[Action]) -> int:
    """Return the most micro-batches between their forward and the end of their backward."""
    now = most = 0
    for action in actions:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most


def check(
    schedule: str | Schedule | Plan,
    stages: int = 0,
    micro_batches: int = 0,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
) -> Timeline:
    """Prove that a schedule computes a step, for one number of stages and micro-batches.

    Every stage computes each micro-batch once forward and, after that, once backward; and there is
    no deadlock: every action's message is sent by an action that can be carried out before.

    Parameters
    ----------
    schedule : str, Schedule or sequence of sequences of Action
        A name of `PIPELINE_SCHEDULES`, a function, or the actions of all stages.
    stages, micro_batches : int
        Of a name or function; if actions are given, they are counted.
    forward, backward : float
        Time of an action.

    Returns
    -------
    Timeline

    Raises
    ------
    PipelineError
        At the first error found, in one sentence.

    >>> from pydtnn.parallel.pipeline.schedules import backward, forward
    >>> check([[forward(0), backward(0)], [backward(0), forward(0)]])
    Traceback (most recent call last):
    ...
    pydtnn.parallel.pipeline.check.PipelineError: stage 1 has backward 0 before forward 0; swap them
    """
    plan = plan_of(schedule, stages, micro_batches)
    numbers = range(1 + max((a.micro_batch for actions in plan for a in actions), default=0))
    if not isinstance(schedule, str) and not callable(schedule):
        micro_batches = len(numbers)
    for stage, actions in enumerate(plan):
        _check_stage(stage, actions, micro_batches)
    events = _carry_out(plan, {"forward": forward, "backward": backward})
    events.sort(key=lambda event: (event.begin, event.stage))
    return Timeline(tuple(events), len(plan), micro_batches)


def plan_of(schedule: str | Schedule | Plan, stages: int, micro_batches: int) -> Plan:
    """List the actions of every stage; parameters as for `check`."""
    if not isinstance(schedule, str) and not callable(schedule):
        return schedule
    check_int("check", "stages", stages, at_least=1)
    check_int("check", "micro_batches", micro_batches, at_least=1)
    return [actions_of(schedule, stage, stages, micro_batches) for stage in range(stages)]


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
    for number in range(micro_batches):
        ahead, back = Action("forward", number), Action("backward", number)
        for action in (ahead, back):
            if action not in times:
                raise PipelineError(f"stage {stage} lacks {action}; add it")
        if actions.index(back) < actions.index(ahead):
            raise PipelineError(f"stage {stage} has {back} before {ahead}; swap them")


def source_of(stage: int, stages: int, action: Action) -> int | None:
    """Return the stage whose message an action waits for; None if it waits for none."""
    source = stage - 1 if action.kind == "forward" else stage + 1
    return source if 0 <= source < stages else None


def _carry_out(plan: Plan, duration: dict[str, float]) -> list[Event]:
    """Carry out the actions of all stages as soon as their messages have arrived."""
    ended: dict[tuple[int, Action], float] = {}
    events: list[Event] = []
    position, now = [0] * len(plan), [0.0] * len(plan)
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(plan):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                source = source_of(stage, len(plan), action)
                if source is not None and (source, action) not in ended:
                    break
                arrival = 0.0 if source is None else ended[source, action]
                begin = max(now[stage], arrival)
                now[stage] = ended[stage, action] = begin + duration[action.kind]
                events.append(Event(stage, action, begin, now[stage]))
                position[stage] += 1
                progress = True
    waiting = [
        f"stage {stage} waits in {actions[place]} for stage "
        f"{source_of(stage, len(plan), actions[place])}"
        for stage, (actions, place) in enumerate(zip(plan, position, strict=True))
        if place < len(actions)
    ]
    if waiting:
        raise PipelineError(f"the stages deadlock: {', '.join(waiting)}; change their order")
    return events

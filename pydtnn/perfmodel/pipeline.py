"""The time of a step of a pipeline, by carrying out its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydtnn.parallel.pipeline.check import Plan, source_of
from pydtnn.parallel.pipeline.schedules import Action


class StageTime(NamedTuple):
    """Times of a stage for one micro-batch, in s.

    Attributes
    ----------
    forward, backward : float
    ahead, back : float
        Of the messages to the stage after and to the stage before.
    """

    forward: float
    backward: float
    ahead: float = 0.0
    back: float = 0.0


def carry_out(plan: Plan, stages: Sequence[StageTime]) -> list[float]:
    """Return the time at which each stage has computed its actions, in s.

    An action begins when its message has arrived; messages do not delay the stage that sends them.

    Parameters
    ----------
    plan : sequence of sequences of Action
        The actions of every stage, without deadlock.
    stages : sequence of StageTime

    Examples
    --------
    >>> from pydtnn.parallel.pipeline.check import plan_of
    >>> carry_out(plan_of("gpipe", 2, 2), [StageTime(1.0, 2.0)] * 2)
    [9.0, 7.0]
    """
    seconds: dict[str, Callable[[StageTime], float]] = {
        "forward": lambda stage: stage.forward,
        "backward": lambda stage: stage.backward,
    }
    sent: dict[tuple[int, Action], float] = {}
    now, position = [0.0] * len(plan), [0] * len(plan)
    while any(place < len(actions) for place, actions in zip(position, plan, strict=True)):
        for number, (actions, stage) in enumerate(zip(plan, stages, strict=True)):
            while position[number] < len(actions):
                action = actions[position[number]]
                source = source_of(number, len(plan), action)
                if source is not None and (source, action) not in sent:
                    break
                arrival = 0.0 if source is None else sent[source, action]
                now[number] = max(now[number], arrival) + seconds[action.kind](stage)
                message = stage.ahead if action.kind == "forward" else stage.back
                sent[number, action] = now[number] + message
                position[number] += 1
    return now

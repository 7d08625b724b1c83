"""Pipeline schedules: the order in which a stage computes its micro-batches.

A schedule is a function of a stage, the number of stages and the number of micro-batches, which
returns the actions of that stage in order. Messages follow from the actions: before ``forward(m)``
a stage receives the values of micro-batch m from the stage before it, and afterwards it sends its
own to the next; ``backward(m)`` does the same with gradients in the other direction. Sends do not
block; an action begins when its message has arrived. Backward may be in two halves: gradients of
inputs, for which the stage before waits, and later those of parameters, for which no stage waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pydtnn.utils.names import some
from pydtnn.utils.registry import Registry


class Action(NamedTuple):
    """Computation of one micro-batch by a stage.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    micro_batch : int
        From 0.
    """

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.micro_batch}"

    @property
    def direction(self) -> int:
        """From which stage to which its messages travel: 1, -1, or 0 if it has none."""
        return KINDS[self.kind]


KINDS = {"forward": 1, "backward": -1, "backward_inputs": -1, "backward_parameters": 0}
"""Kinds of actions, with the direction of the messages that they wait for and send."""

LAST = ("backward", "backward_parameters")
"""Kinds of the last action of a micro-batch, which releases its values."""


def forward(micro_batch: int) -> Action:
    """Compute the outputs and the loss of a micro-batch, and keep the values for backward."""
    return Action("forward", micro_batch)


def backward(micro_batch: int) -> Action:
    """Compute the gradients of a micro-batch, and release its values."""
    return Action("backward", micro_batch)


def backward_inputs(micro_batch: int) -> Action:
    """Compute the first half of backward: the gradients that the stage before waits for."""
    return Action("backward_inputs", micro_batch)


def backward_parameters(micro_batch: int) -> Action:
    """Compute the second half of backward: the gradients of parameters; release all values."""
    return Action("backward_parameters", micro_batch)


Schedule = Callable[[int, int, int], Iterable[Action]]
"""Function ``(stage, stages, micro_batches)`` that returns the actions of a stage."""


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes; every stage keeps all micro-batches.

    References
    ----------
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019, section 2.2. Backward passes are in the order of the forward passes here, so that
    gradients are summed in the order of every other schedule.

    >>> [str(action) for action in gpipe(0, 2, 2)]
    ['forward 0', 'forward 1', 'backward 0', 'backward 1']
    """
    every = range(micro_batches)
    return [*map(forward, every), *map(backward, every)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Backward of each micro-batch as early as possible; a stage keeps at most ``stages - stage``.

    References
    ----------
    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    section 3.2; with one update per step as PipeDream-Flush in "Memory-Efficient Pipeline-Parallel
    DNN Training", ICML 2021.

    >>> [str(action) for action in one_forward_one_backward(0, 2, 3)]  # doctest: +ELLIPSIS
    ['forward 0', 'forward 1', 'backward 0', 'forward 2', 'backward 1', 'backward 2']
    """
    return _alternating(stages - stage - 1, micro_batches)


def eager_one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """As 1F1B with twice as many forward passes in advance.

    A stage keeps at most ``2 (stages - stage) - 1`` micro-batches. Those in advance cover the time
    of messages, and differences between the times of stages and micro-batches.

    References
    ----------
    Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023, section 4.

    >>> [str(action) for action in eager_one_forward_one_backward(0, 2, 3)]
    ['forward 0', 'forward 1', 'forward 2', 'backward 0', 'backward 1', 'backward 2']
    """
    return _alternating(2 * (stages - stage - 1), micro_batches)


def zb_h1(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """As 1F1B, with gradients of parameters `stage` micro-batches later than those of inputs.

    They are computed where 1F1B waits at the end of a step. Every stage keeps at most `stages`
    micro-batches, as the first one does with 1F1B.

    References
    ----------
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (arXiv 2023), section 2.2: ZB-H1.

    >>> [str(action) for action in zb_h1(1, 2, 2)]  # doctest: +NORMALIZE_WHITESPACE
    ['forward 0', 'backward_inputs 0', 'forward 1', 'backward_inputs 1',
     'backward_parameters 0', 'backward_parameters 1']
    """
    return _alternating(stages - stage - 1, micro_batches, delay=stage)


def zb_2p(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """As ZB-H1 with twice as many forward passes in advance, and twice the delay.

    If an action takes the same time in every kind and stage, no stage waits between its first and
    its last action. Every stage keeps at most ``2 stages - 1`` micro-batches.

    References
    ----------
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (arXiv 2023), sections 2.2 and 5: the
    schedule ZB-H2, which their search finds as ZB-2p.
    """
    return _alternating(2 * (stages - stage - 1), micro_batches, delay=2 * stage)


def _alternating(ahead: int, micro_batches: int, delay: int | None = None) -> list[Action]:
    """Forward passes in advance, then one forward and one backward pass in turn.

    With a delay, gradients of parameters are computed that many micro-batches later than those of
    inputs.
    """
    ahead, numbers = min(ahead, micro_batches), range(micro_batches)
    actions = [*map(forward, numbers[:ahead])]
    for m in numbers:
        actions += map(forward, numbers[m + ahead : m + ahead + 1])
        if delay is None:
            actions.append(backward(m))
        else:
            actions.append(backward_inputs(m))
            actions += map(backward_parameters, numbers[max(m - delay, 0) : max(m - delay + 1, 0)])
    if delay is not None:
        actions += map(backward_parameters, numbers[max(micro_batches - delay, 0) :])
    return actions


PIPELINE_SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager_1f1b": eager_one_forward_one_backward,
    "zb_h1": zb_h1,
    "zb_2p": zb_2p,
}
"""Schedules by their names on the command line."""

SCHEDULE: Registry[Any] = Registry(
    "pipeline schedule",
    PIPELINE_SCHEDULES,
    Callable,
    "a function of a stage, the number of stages and the number of micro-batches",
)


def find(schedule: str | Schedule) -> Schedule:
    """Return the schedule of a name or of ``path/to/file.py:function``; a function unchanged.

    Raises
    ------
    TypeError, ValueError
        If there is none of that name, or it is not a function.
    """
    found: Schedule = SCHEDULE.find(schedule).target
    return found


def actions_of(
    schedule: str | Schedule, stage: int, stages: int, micro_batches: int
) -> tuple[Action, ...]:
    """List the actions of a stage.

    Raises
    ------
    TypeError
        If the function does not return actions.
    """
    function = find(schedule)
    who = getattr(function, "__name__", repr(function))
    returned: Any = function(stage, stages, micro_batches)
    if not isinstance(returned, Iterable):
        raise TypeError(f"{who}: a pipeline schedule must return actions, got {returned!r}")
    actions = tuple(returned)
    for action in actions:
        if not isinstance(action, Action) or action.kind not in KINDS:
            raise TypeError(
                f"{who}: the actions of a stage must be {some([f'{k}(m)' for k in KINDS])}, got "
                f"{action!r}"
            )
    return actions


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a stage waits: ``(S - 1) / (M + S - 1)``.

    For GPipe, 1F1B and eager 1F1B, with equal stages and messages that take no time.

    >>> bubble(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)

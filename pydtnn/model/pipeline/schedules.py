"""Pipeline schedules: the order in which a rank computes the micro-batches of its stages.

A schedule is a function of a rank, the number of ranks and the number of micro-batches, which
returns the actions of that rank in order. The stages that they name are the rank's: one of its own
number by default, or several. Messages follow from the actions: before ``forward(m)`` a stage
receives the values of micro-batch m from the stage before it, and afterwards it sends its own to
the next; ``backward(m)`` does the same with gradients in the other direction. Sends do not block;
an action begins when its message has arrived. Backward may be in two halves: gradients of inputs,
for which the stage before waits, and later those of parameters, for which no stage waits.
Micro-batches with numbers below 0 are those of the step before, -1 its last one: the schedule is
then asynchronous, and steps follow one another without an end between them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from heapq import heappop, heappush
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, cast

from pydtnn.utils.names import shorten
from pydtnn.utils.registry import Registry
from pydtnn.utils.validate import check_int


class Action(NamedTuple):
    """Computation of one micro-batch by a stage.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    micro_batch : int
        From 0.
    stage : int
        From 0; -1, in the actions that a schedule returns, is the stage of the rank's number.
    """

    kind: str
    micro_batch: int
    stage: int = -1

    def __str__(self) -> str:
        return f"{self.kind} {self.micro_batch}"

    @property
    def direction(self) -> int:
        """From which stage to which its messages travel: 1, -1, or 0 if it has none."""
        return KINDS[self.kind]


class PipelineError(ValueError):
    """A schedule that does not compute a step; the text names the stage and the action."""


KINDS = {"forward": 1, "backward": -1, "backward_inputs": -1, "backward_parameters": 0}
"""Kinds of actions, with the direction of the messages that they wait for and send."""

LAST = ("backward", "backward_parameters")
"""Kinds of the last action of a micro-batch, which releases its values."""


def forward(micro_batch: int, stage: int = -1) -> Action:
    """Compute the outputs and the loss of a micro-batch, and keep the values for backward."""
    return Action("forward", micro_batch, stage)


def backward(micro_batch: int, stage: int = -1) -> Action:
    """Compute the gradients of a micro-batch, and release its values."""
    return Action("backward", micro_batch, stage)


def backward_inputs(micro_batch: int, stage: int = -1) -> Action:
    """Compute the first half of backward: the gradients that the stage before waits for."""
    return Action("backward_inputs", micro_batch, stage)


def backward_parameters(micro_batch: int, stage: int = -1) -> Action:
    """Compute the second half of backward: the gradients of parameters; release all values."""
    return Action("backward_parameters", micro_batch, stage)


Schedule = Callable[[int, int, int], Iterable[Action]]
"""Function ``(rank, ranks, micro_batches)`` that returns the actions of a rank."""


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
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


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Backward of each micro-batch as early as possible; a stage keeps at most ``stages - stage``.

    References
    ----------
    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    section 3.2; with one update per step as PipeDream-Flush in "Memory-Efficient Pipeline-Parallel
    DNN Training", ICML 2021.

    >>> [str(action) for action in one_forward_one_backward(0, 2, 3)]  # doctest: +ELLIPSIS
    ['forward 0', 'forward 1', 'backward 0', 'forward 2', 'backward 1', 'backward 2']
    """
    return _alternating(ranks - rank - 1, micro_batches)


def eager_one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """As 1F1B with twice as many forward passes in advance.

    A stage keeps at most ``2 (stages - stage) - 1`` micro-batches. Those in advance cover the time
    of messages, and differences between the times of stages and micro-batches.

    References
    ----------
    Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023, section 4.

    >>> [str(action) for action in eager_one_forward_one_backward(0, 2, 3)]
    ['forward 0', 'forward 1', 'forward 2', 'backward 0', 'backward 1', 'backward 2']
    """
    return _alternating(2 * (ranks - rank - 1), micro_batches)


def pipedream_2bw(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1F1B without an end between steps: no stage waits, and gradients are a version late.

    Between the first forward passes of a step, a stage computes backward of the last micro-batches
    of the step before, which have numbers below 0: as many as there are later stages, at most all.
    A step uses the weights of its beginning in both passes, so that two versions exist.

    References
    ----------
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1:
    PipeDream-2BW.

    >>> [str(action) for action in pipedream_2bw(0, 2, 2)]
    ['forward 0', 'backward -1', 'forward 1', 'backward 0']
    """
    ahead = min(ranks - rank - 1, micro_batches)
    return [a for m in range(micro_batches) for a in (forward(m), backward(m - ahead))]


def zb_h1(rank: int, ranks: int, micro_batches: int) -> list[Action]:
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
    return _alternating(ranks - rank - 1, micro_batches, delay=rank)


def zb_2p(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """As ZB-H1 with twice as many forward passes in advance, and twice the delay.

    If an action takes the same time in every kind and stage, no stage waits between its first and
    its last action. Every stage keeps at most ``2 stages - 1`` micro-batches.

    References
    ----------
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (arXiv 2023), sections 2.2 and 5: the
    schedule ZB-H2, which their search finds as ZB-2p.
    """
    return _alternating(2 * (ranks - rank - 1), micro_batches, delay=2 * rank)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 2) -> list[Action]:
    """As 1F1B with several stages per rank, which divide the bubble by their number.

    Stage s is on rank ``s % ranks``: the network passes through all ranks `chunks` times. A rank
    computes as many micro-batches as there are ranks in one of its stages, then as many in the
    next. It keeps more values than with 1F1B: at most ``1 + (ranks - 1) / (ranks chunks)`` times.

    References
    ----------
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 2.2.

    >>> [f"{action} of {action.stage}" for action in interleaved(1, 2, 2)[:5]]
    ['forward 0 of 1', 'forward 1 of 1', 'forward 0 of 3', 'backward 0 of 3', 'forward 1 of 3']
    """
    groups = [range(m, m + ranks) for m in range(0, micro_batches, ranks)]
    stages = range(rank, chunks * ranks, ranks)
    forwards = [(m, stage) for group in groups for stage in stages for m in group]
    backwards = [(m, stage) for group in groups for stage in stages[::-1] for m in group]
    ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    actions = _in_turn(ahead, forwards, [[backward(*place)] for place in backwards])
    return [action for action in actions if action.micro_batch < micro_batches]


def zb_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Two stages per rank, in a V: the first rank has the first stage and the last one.

    Backward begins on the rank on which forward has ended, and so on the first rank early. If an
    action takes the same time in every kind and stage, no rank waits between its first and its last
    action, and every rank keeps as many values as the first one does with 1F1B.

    References
    ----------
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6: ZB-V.
    """
    first, last = rank, 2 * ranks - 1 - rank
    f, b, w = ([(kind, first)] for kind in (forward, backward_inputs, backward_parameters))
    F, B, W = ([(kind, last)] for kind in (forward, backward_inputs, backward_parameters))
    numbers = max(micro_batches, 2 * ranks - 1)
    order = [
        *(2 * (ranks - rank) - 1) * f,
        *rank * (F + f),
        *(ranks - rank) * (F + B + W),
        *(numbers - ranks) * (f + b + w + F + B + W),
        *rank * (b + B),
        *(ranks - rank) * (b + w),
        *rank * W,
        *rank * w,
    ]
    return [action for action in _numbered(order) if action.micro_batch < micro_batches]


def chimera(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Even micro-batches run from the first rank to the last, odd ones from the last to the first.

    Every rank has two stages, each of which another rank has, too: that of its own number for even
    micro-batches, and that of the opposite rank for odd ones. If forward and backward take the same
    time, a rank waits for ``ranks - 2`` of them in a step. It keeps between ``ranks / 2 + 1`` and
    `ranks` micro-batches of one stage.

    References
    ----------
    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
    Pipelines", SC 2021, sections 3.1 and 3.5: with two pipelines, and direct concatenation of units
    of as many micro-batches as ranks.

    >>> [f"{action} of {action.stage}" for action in chimera(0, 2, 2)]
    ['forward 0 of 0', 'forward 1 of 1', 'backward 1 of 1', 'backward 0 of 0']
    """
    _check_halves("chimera", ranks)
    slots = []  # in slots of equal length no rank has two actions at a time
    for m in range(micro_batches):
        unit, place = divmod(m // 2, ranks // 2)
        stage, begin = ranks - 1 - rank if m % 2 else rank, 2 * (ranks * unit + place)
        slots.append((begin + stage, forward(m, stage)))
        slots.append((begin + 2 * ranks - 1 - stage, backward(m, stage)))
    return [action for _, action in sorted(slots)]


def dualpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Micro-batches in both directions as in Chimera, with backward in two halves.

    In the middle of a step every rank computes forward in one direction, then backward in the
    other. If an action takes the same time in every kind and stage, a rank waits for
    ``ranks / 2 - 1`` of them in a step of at least ``2 ranks`` micro-batches. It keeps at most
    ``ranks + 1`` micro-batches of one stage.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1: DualPipe, here without its
    overlap of the layers of two micro-batches, and with the last gradients of parameters at the
    end of a step.
    """
    _check_halves("dualpipe", ranks)
    near, far = sorted((rank, ranks - 1 - rank))
    number = max((micro_batches + 1) // 2, ranks)  # of each direction
    after = near + 1
    before = ranks // 2 - after
    f, b, w = ([(kind, near)] for kind in (forward, backward_inputs, backward_parameters))
    F, B, W = ([(kind, far)] for kind in (forward, backward_inputs, backward_parameters))
    order = [
        *2 * before * f,
        *after * (f + F),
        *before * (B + W + F),
        *(number - ranks + after) * (f + B + W + F + b + w),
        *before * (B + W + F + b + w),
        *after * (B + b),
        *before * (w + b),
        *after * (W + w),
    ]
    odd = {near: int(rank == far), far: int(rank == near)}
    actions = [a._replace(micro_batch=2 * a.micro_batch + odd[a.stage]) for a in _numbered(order)]
    return [action for action in actions if action.micro_batch < micro_batches]


def recycle(rank: int, ranks: int, micro_batches: int, grid: str = "") -> list[Action]:
    """Several pipelines without ranks that have failed, whose micro-batches their peers compute.

    Micro-batch m is one of pipeline ``m % pipelines``. Where that has lost a stage, the ranks with
    the same stage in the other pipelines take turns. Backward is in two halves, so that the second
    ones, for which no stage waits, are computed where a rank would wait. Every rank keeps at most
    as many micro-batches as there are stages, as the first one does with 1F1B.

    Parameters
    ----------
    rank, ranks, micro_batches
        The ranks that remain, in their order, and the micro-batches of all pipelines together.
    grid : str
        Pipelines, stages and lost ranks: "2x4-5" is two pipelines of four stages without rank 5,
        the second stage of the second one. By default one pipeline that is complete.

    References
    ----------
    Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation", SOSP 2024,
    sections 3.1 and 3.2: adaptive pipelining and decoupled backward, here with a list schedule
    instead of an integer program, and without the staggered optimizer.

    >>> [str(action) for action in recycle(0, 3, 2, "2x2-2")[:3]]
    ['forward 0', 'forward 1', 'backward_inputs 0']
    """
    return [*_recycled(grid or f"1x{ranks}", ranks, micro_batches)[rank]]


@lru_cache(64)
def _recycled(grid: str, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks: in slots of equal length each takes the most urgent one."""
    paths = [*_paths_without(grid, ranks, micro_batches)]
    urgent = ("backward_inputs", "forward", "backward_parameters")
    ready: list[dict[str, list[int]]] = [{kind: [] for kind in urgent} for _ in range(ranks)]
    stage_of = {rank: stage for path in paths for stage, rank in enumerate(path)}
    kept, plan = [0] * ranks, [list[Action]() for _ in range(ranks)]
    arrived = [(path[0], "forward", m) for m, path in enumerate(paths)]
    while arrived or any(map(any, (own.values() for own in ready))):
        for rank, kind, m in arrived:
            heappush(ready[rank][kind], m)
        arrived = []
        for rank, own in enumerate(ready):
            full = kept[rank] == len(paths[0])
            kind = next((k for k in urgent if own[k] and not (full and k == "forward")), "")
            if not kind:
                continue
            m, stage = heappop(own[kind]), stage_of[rank]
            plan[rank].append(Action(kind, m, stage))
            kept[rank] += (kind == "forward") - (kind == "backward_parameters")
            to, path = stage + KINDS[kind], paths[m]
            if kind != "backward_parameters" and 0 <= to < len(path):
                arrived.append((path[to], kind, m))
            if kind == "backward_inputs" or to == len(path):
                arrived.append((rank, urgent[(kind == "backward_inputs") * 2], m))
    return tuple(map(tuple, plan))


def _paths_without(grid: str, ranks: int, micro_batches: int) -> Iterable[tuple[int, ...]]:
    """Yield the rank of each stage for each micro-batch."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)((?:-\d+)*)", grid)
    pipelines, stages = map(int, found.groups()[:2]) if found else (0, 0)
    lost = {*map(int, found[3].split("-")[1:])} if found else set()
    remaining = [place for place in range(pipelines * stages) if place not in lost]
    peers = [[place for place in remaining if place % stages == s] for s in range(stages)]
    if len(remaining) != ranks or not all(peers):
        raise PipelineError(
            f"recycle: expected pipelines, stages and lost ranks such as 2x4-5, of which {ranks} "
            f"ranks remain, at least one of each stage, got {grid}; use others"
        )
    for m in range(micro_batches):
        turn, number = divmod(m, pipelines)
        own = (
            (number * stages + s, peers[s][(turn + number) % len(peers[s])]) for s in range(stages)
        )
        yield tuple(remaining.index(peer if place in lost else place) for place, peer in own)


def _check_halves(who: str, ranks: int) -> None:
    """Raise PipelineError if ranks have no halves that mirror each other."""
    if ranks % 2:
        raise PipelineError(
            f"{who}: expected an even number of ranks, whose halves mirror each other, got "
            f"{ranks}; use another number, or 1f1b"
        )


def _numbered(order: Iterable[tuple[Callable[[int, int], Action], int]]) -> list[Action]:
    """Return actions of each kind and stage, in a given order, with micro-batches from 0."""
    done: Counter[Any] = Counter()
    actions = []
    for kind, stage in order:
        actions.append(kind(done[kind, stage], stage))
        done[kind, stage] += 1
    return actions


def _alternating(ahead: int, micro_batches: int, delay: int | None = None) -> list[Action]:
    """Forward passes in advance, then one forward and one backward pass in turn.

    With a delay, gradients of parameters are computed that many micro-batches later than those of
    inputs.
    """
    numbers = range(micro_batches)
    if delay is None:
        back = [[backward(m)] for m in numbers]
    else:
        back = [
            [
                backward_inputs(m),
                *map(backward_parameters, numbers[max(m - delay, 0) : max(m - delay + 1, 0)]),
            ]
            for m in numbers
        ]
        back.append([*map(backward_parameters, numbers[max(micro_batches - delay, 0) :])])
    return _in_turn(ahead, [(m,) for m in numbers], back)


def _in_turn(
    ahead: int, forwards: Sequence[tuple[int, ...]], backwards: Sequence[Sequence[Action]]
) -> list[Action]:
    """Compute forward passes in advance, then one of them and the next backward pass in turn."""
    actions = [forward(*place) for place in forwards[:ahead]]
    for place, back in zip_longest(forwards[ahead:], backwards, fillvalue=()):
        actions += [forward(*place)] if place else []
        actions += back
    return actions


PIPELINE_SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager_1f1b": eager_one_forward_one_backward,
    "zb_h1": zb_h1,
    "zb_2p": zb_2p,
    "interleaved": interleaved,
    "zb_v": zb_v,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "recycle": recycle,
    "2bw": pipedream_2bw,
}
"""Schedules by their names on the command line."""

SCHEDULE: Registry[Any] = Registry(
    "pipeline schedule",
    PIPELINE_SCHEDULES,
    Callable,
    "a function of a rank, the number of ranks and the number of micro-batches",
)


def find(schedule: str | Schedule) -> Schedule:
    """Return the schedule of a name or of ``path/to/file.py:function``; a function unchanged.

    What follows the name is the value of the parameter behind `micro_batches`: "interleaved:3" has
    3 stages per rank, "recycle:2x4-5" two pipelines of four stages without rank 5.

    Raises
    ------
    TypeError, ValueError
        If there is none of that name, or it is not a function.
    """
    name, _, value = schedule.rpartition(":") if isinstance(schedule, str) else ("", "", "")
    if not (name and re.fullmatch(r"\d[\dx-]*", value)):
        found: Schedule = SCHEDULE.find(schedule).target
        return found
    several: Any = SCHEDULE.find(name).target
    further = [*inspect.signature(several).parameters.values()][3:]
    kind = type(further[0].default) if further else None
    if kind not in (int, str) or (kind is int and not value.isdigit()):
        wanted = "with a parameter for a value" if kind is None else "with a number"
        raise ValueError(
            f"pipeline schedule {schedule}: expected one {wanted} behind its name, such as "
            f"interleaved:3 or recycle:2x4-5; omit {value}, or use another schedule"
        )
    option, given = further[0].name, int(value) if kind is int else value
    if kind is int:
        check_int("pipeline schedule", option, given, at_least=1)
    return _with_value(several, option, given)


_with_value = lru_cache(64)(lambda function, option, value: partial(function, **{option: value}))


F = TypeVar("F", bound=Callable[..., Any])


def _once(function: F) -> F:
    """Remember the results for a schedule, not for its name, which may be given to another one."""
    remembered = lru_cache(1024)(function)

    @wraps(function)
    def call(schedule: str | Schedule, *arguments: Any, **options: Any) -> Any:
        found = find(schedule)
        of = remembered if isinstance(found, Hashable) else function
        return of(found, *arguments, **options)

    return cast(F, call)


@_once
def actions_of(
    schedule: str | Schedule, rank: int, ranks: int, micro_batches: int, steps: int = 1
) -> tuple[Action, ...]:
    """List the actions of a rank in consecutive steps, each with the number of its stage.

    No micro-batch is in flight before the first and after the last; they are numbered throughout.

    >>> [str(action) for action in actions_of("2bw", 0, 2, 2)]
    ['forward 0', 'forward 1', 'backward 0', 'backward 1']
    """
    own = actions_within(schedule, rank, ranks, micro_batches)
    further = -(min([0, *(a.micro_batch for a in own)]) // micro_batches)
    moved = (
        (step, a._replace(micro_batch=a.micro_batch + step * micro_batches))
        for step in range(steps + further)
        for a in own
    )
    total = steps * micro_batches
    return tuple(a for k, a in moved if a.micro_batch >= 0 and (k < steps or a.micro_batch < total))


def actions_within(
    schedule: str | Schedule, rank: int, ranks: int, micro_batches: int
) -> tuple[Action, ...]:
    """List the actions of a rank in a step among others, as the schedule returns them.

    Micro-batches of the step before have numbers below 0, -1 that of its last one.

    Raises
    ------
    TypeError
        If the function does not return actions.
    """
    function = find(schedule)
    who = getattr(function, "__name__", repr(function))
    returned: Any = function(rank, ranks, micro_batches)
    if not isinstance(returned, Iterable):
        raise TypeError(f"{who}: a pipeline schedule must return actions, got {returned!r}")
    actions = tuple(returned)
    for action in actions:
        if not isinstance(action, Action) or action.kind not in KINDS:
            raise TypeError(
                f"{who}: the actions of a rank must be {shorten([f'{k}(m)' for k in KINDS])}, got "
                f"{action!r}"
            )
    return with_stages(actions, rank)


def with_stages(actions: Iterable[Action], rank: int) -> tuple[Action, ...]:
    """Return the actions of a rank with the number of the stage where it is not given."""
    return tuple(a._replace(stage=rank) if a.stage == -1 else a for a in actions)


@_once
def is_asynchronous(schedule: str | Schedule, ranks: int) -> bool:
    """Return whether micro-batches of a step are in flight when the next one begins."""
    plan = (actions_within(schedule, rank, ranks, ranks) for rank in range(ranks))
    return any(action.micro_batch < 0 for actions in plan for action in actions)


class Owners(NamedTuple):
    """The ranks of the stages.

    Attributes
    ----------
    paths : tuple of tuple of int
        The rank of each stage; of several paths, micro-batches take one after the other: of two,
        the first is that of even ones.
    """

    paths: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.paths[0])

    def of(self, stage: int, micro_batch: int = 0) -> int:
        """Return the rank that computes a micro-batch in a stage."""
        return self.paths[micro_batch % len(self.paths)][stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [s for s in range(self.stages) if rank in (path[s] for path in self.paths)]

    def copies_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the stages of a rank, itself included."""
        first = self.stages_of(rank)[0]
        return tuple(sorted({path[first] for path in self.paths}))


def owners_of(plan: Sequence[Sequence[Action]]) -> Owners:
    """Return the rank of each stage, from the actions of all ranks.

    Raises
    ------
    PipelineError
        If a stage is on no rank, or on two that compute the same micro-batches or differ in their
        other stages.
    """
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)  # of each micro-batch
    for rank, actions in enumerate(plan):
        for stage, m in sorted({(a.stage, a.micro_batch) for a in actions}):
            other = found[m].setdefault(stage, rank)
            if other != rank:
                raise PipelineError(
                    f"stage {stage} is on rank {other} and on rank {rank}; keep the actions of one"
                )
    known = {stage: rank for own in found.values() for stage, rank in own.items()} or {0: 0}
    if lacking := [stage for stage in range(len(known)) if stage not in known]:
        raise PipelineError(
            f"no rank has stage {lacking[0]}, but one has {max(known)}; number stages from 0"
        )
    each = [found[m] for m in range(1 + max(found, default=0))]
    paths = [tuple(own.get(s, known[s]) for s in range(len(known))) for own in each]
    period = next(n for n in range(1, len(paths) + 1) if paths[n:] == paths[:-n])
    owners = Owners(tuple(paths[:period]))
    for stage, ranks in enumerate(zip(*owners.paths, strict=True)):
        for other in ranks:
            if owners.stages_of(ranks[0]) != owners.stages_of(other):
                raise PipelineError(
                    f"stage {stage} is on rank {ranks[0]} and on rank {other}, whose other stages "
                    "differ; give both the same stages"
                )
    return owners


MOST = 1 << 10
"""Micro-batches after which the ranks of stages must repeat."""


@_once
def placement(schedule: str | Schedule, ranks: int) -> Owners:
    """Return the ranks of the stages of a schedule, from its actions for a few micro-batches.

    These are as many as show that the ranks repeat, so that they are known for any number.

    Raises
    ------
    PipelineError
        If they do not, or a rank has no stage.

    >>> placement("interleaved:2", 3).paths, placement("chimera", 2).paths
    (((0, 1, 2, 0, 1, 2),), ((0, 1), (1, 0)))
    >>> placement("recycle:2x2-2", 3).paths
    ((0, 1), (0, 2))
    """
    micro_batches = 2
    while micro_batches <= MOST:
        plan = [actions_of(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
        owners = owners_of(plan)
        used = {rank for path in owners.paths for rank in path}
        if 2 * len(owners.paths) <= micro_batches and len(used) == ranks:
            return owners
        micro_batches *= 2
    raise PipelineError(
        f"the ranks of stages do not repeat within {MOST} micro-batches, or one of {ranks} ranks "
        "has no stage; let the rank depend on the remainder of the micro-batch by a small number"
    )


def is_possible(schedule: str | Schedule, ranks: int) -> bool:
    """Return whether a schedule is defined for a number of ranks."""
    try:
        placement(schedule, ranks)
    except PipelineError:
        return False
    return True

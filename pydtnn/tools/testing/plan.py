"""Check of the parallel execution of a network under a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import agree
from pydtnn.data import ArrayDataset
from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers import Block, Layer, Sequential
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import Net
from pydtnn.layers.collectives import PIPELINE
from pydtnn.losses import Loss
from pydtnn.model import Model
from pydtnn.model.model import example_inputs
from pydtnn.model.partition.plan import NAMES, find_plan
from pydtnn.model.pipeline import Schedule, is_possible, placement
from pydtnn.model.pipeline import check as check_schedule
from pydtnn.optimizers import SGD
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing.trace import first_wrong
from pydtnn.tools.testing.trajectory import (
    END,
    AnyPlan,
    Conditions,
    Problem,
    Ranks,
    Trajectory,
    TrajectoryCase,
    TrajectoryDifference,
    changed_bytes,
    different_copies,
    largest_difference,
    train_serially,
)
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_float, check_int

MAX_RANKS = 64

STEPS = 3

KINDS = ("initial value", "output", "gradient of input", "gradient", "statistic", "parameter")
"""Kinds of arrays that are compared, in the order in which a step computes them."""

REPLICATED = ("output", "gradient of input", "statistic", "parameter")
"""Kinds of arrays of which ranks with the same part must have the same bytes."""

LR, MOMENTUM = 0.01, 0.9


def mesh_name(axes: Mapping[str, int]) -> str:
    """Return the axes of a mesh: "data=2, filter=2"."""
    return ", ".join(f"{name}={ranks}" for name, ranks in axes.items())


@dataclass(frozen=True)
class PlanRow:
    """A plan on one mesh.

    Attributes
    ----------
    mesh : dict of str to int
    differences : dict of str to float
        For each kind of arrays the largest difference from serial training, relative to the largest
        magnitude of the kind, over all steps, with and without fusion.
    messages, bytes : float
        Messages that rank 0 sends in a step, and B, those for gradients included.
    refused : str
        Why the plan is not possible on this mesh; an empty string if it is.
    """

    mesh: dict[str, int]
    differences: dict[str, float]
    messages: float = 0.0
    bytes: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class PlanReport:
    """Result of `check_plan`; its string is a table.

    Attributes
    ----------
    plan : str
    parameters : int
        Number of parameters of the network.
    batch : int
    rows : tuple of PlanRow
        One for each mesh.
    """

    plan: str
    parameters: int
    batch: int
    rows: tuple[PlanRow, ...]

    def __str__(self) -> str:
        width = max(len(mesh_name(row.mesh)) for row in self.rows)
        kinds = [kind for kind in KINDS if kind != "initial value"]
        short = {"gradient of input": "dx"}
        head = "".join(f"{short.get(kind, kind):>11}" for kind in kinds)
        lines = [
            f"{self.plan}: {self.parameters} parameters, {STEPS} steps of {self.batch} samples, "
            "float64; largest difference from serial training, relative",
            f"{'mesh':{width}}{head}  messages/step    B/step",
        ]
        for row in self.rows:
            name = f"{mesh_name(row.mesh):{width}}"
            if row.refused:
                lines.append(f"{name}  not possible: {row.refused}")
                continue
            values = "".join(f"{row.differences[kind]:11.1e}" for kind in kinds)
            lines.append(f"{name}{values}  {row.messages:13.1f}  {row.bytes:8.0f}")
        return "\n".join(lines)


class LinearLoss(Loss):
    """Sum of predictions times targets: the gradient does not depend on the predictions."""

    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        out[...] = target * scale
        return (y * target).sum()


class PlanCase(TrajectoryCase):
    """A plan on one mesh.

    Parameters
    ----------
    problem : Problem
    serial : callable
        Returns the result of serial training with a batch size under conditions.
    axes : dict of str to int
        Axes of the mesh.
    comm : Communicator or None
        The ranks; None for threads.
    tolerance : float
    timeout : float
        Maximum duration of one run of threads, in s.
    """

    def __init__(
        self,
        problem: Problem,
        serial: Callable[[int, Conditions], Trajectory],
        axes: Mapping[str, int],
        *,
        comm: Communicator | None,
        tolerance: float,
        timeout: float,
    ) -> None:
        self.stages, self.data = (axes.get(name, 1) for name in (PIPELINE, "data"))
        if problem.batch < self.data:  # then only the last step of an epoch has so few samples
            problem = replace(problem, batch=self.data)
        super().__init__(problem, Ranks(prod(axes.values()), axes, comm=comm, timeout=timeout))
        self.serial, self.axes, self.tolerance = serial, dict(axes), tolerance
        self.differences: dict[str, float] = {}

    def refusal(self) -> str:
        """Return why the plan is not possible on this mesh; an empty string if it is."""

        def rank(comm: Communicator) -> str:
            error = None
            with Mesh(comm, **self.axes) as mesh:
                try:
                    self.problem.model(mesh, Conditions(input_gradient=self.stages == 1))
                except (ValueError, TypeError) as refused:
                    error = refused
                try:
                    agree(comm, error)
                except AgreedError as agreed:
                    return str(agreed)
            return ""

        return str(self.ranks.call(rank)[0])

    def check(self) -> PlanRow:
        """Train under all conditions and compare.

        Batch norm normalises the samples of all ranks, or in stages, which do not support this,
        those of each rank along "data", which serial training computes one after the other;
        running statistics are not compared then.
        """
        plain: dict[bool, list[Trajectory]] = {}
        for fuse, seed in ((False, None), (True, None), (False, 1), (True, 2)):
            conditions = Conditions(
                fuse=fuse,
                input_gradient=not fuse and self.stages == 1,
                sync=self.stages == 1,
                shards=1 if self.stages == 1 else self.data,
                delays=seed,
            )
            way = _describe(conditions)
            ranks = self.train(self.problem, conditions, way)
            kinds = [k for k in KINDS if k != "gradient of input" or conditions.input_gradient]
            if conditions.shards > 1:  # each rank has the statistics of its samples
                kinds.remove("statistic")
            if worst := self._compare(ranks, self._train_serially(conditions), kinds, way):
                self.fail(self._explain(worst, conditions), way)
            for difference in changed_bytes(ranks, plain.setdefault(fuse, ranks), KINDS):
                self.fail(f"{difference}; it depends on which rank comes first", way)
        first = plain[True][0]
        differences = {kind: self.differences.get(kind, 0.0) for kind in KINDS}
        return PlanRow(self.axes, differences, first.messages / STEPS, first.bytes / STEPS)

    def _compare(
        self,
        ranks: Sequence[Trajectory],
        serial: Trajectory,
        kinds: Sequence[str],
        way: str,
    ) -> TrajectoryDifference | None:
        """Return the first difference from serial training, if it is above the tolerance.

        Ranks with the same part of an array, of the same samples, must have the same bytes of it.
        """
        keys = [key for key, arrays in serial.values.items() if key[1] in kinds and arrays]
        if "statistic" not in kinds:  # on which an evaluation depends
            keys = [key for key in keys if key != (END, "output")]
        for key in keys:
            _, kind = key
            names = {name for trajectory in ranks for name in trajectory.values[key]}
            if wrong := names ^ serial.values[key].keys():
                where = "only ranks have" if wrong & names else "no rank has"
                self.fail(f"{min(wrong)}: {where} the {kind}", way)
            worst = largest_difference(ranks, serial, key)
            if not worst.value <= self.tolerance:
                return worst
            self.differences[kind] = max(self.differences.get(kind, 0.0), worst.value)
        for difference in different_copies(ranks, (k for k in keys if k[1] in REPLICATED)):
            hint = "ranks with the same part must compute the same, sums in the same order"
            self.fail(f"{difference}; {hint}", way)
        self.check_requests(ranks, way)
        return None

    def _train_serially(self, conditions: Conditions) -> Trajectory:
        """Return the result of serial training with the same batches and statistics."""
        serial = replace(conditions, fuse=False, input_gradient=True, delays=None)
        return self.serial(self.problem.batch, serial)

    def _explain(self, worst: TrajectoryDifference, conditions: Conditions) -> str:
        """Train again, and return the first layer whose output, or gradient, differs."""
        step, kind = worst.key
        what = f"{worst} (tolerance {self.tolerance:g})"
        wrong = None
        if kind != "initial value" and not conditions.fuse:
            traced = replace(conditions, traced=step)
            ranks = self.train(self.problem, traced, _describe(traced))
            traces = [(trajectory.position, trajectory.trace) for trajectory in ranks]
            wrong = first_wrong(self._train_serially(traced).trace, traces, self.tolerance)
        if wrong is None:
            return f"{worst.name.rpartition('.')[0] or worst.name}: {what}"
        node, readers = wrong.node, wrong.readers
        off = f"differs from serial training, by {wrong.difference:.1e}; {what}"
        if wrong.what == "output":
            return f"{node}: the output is the first that {off}"
        if not readers:
            hint = "check the weights of ranks, samples and micro-batches"
            return f"trainer: the gradient of the loss at the output of {node} {off}; {hint}"
        layers = " and ".join(readers)
        of = f"the gradient of the input, which is the output of {node}, is the last that"
        return f"{layers}: {of} {off}"

    def fail(self, what: str, when: str = "", error: Exception | None = None) -> NoReturn:
        raise AssertionError(f"{what} [mesh {mesh_name(self.axes)}, {when}]") from error


def _describe(conditions: Conditions) -> str:
    delays = conditions.delays
    delayed = "" if delays is None else f" with random delays (seed {delays})"
    return f"{'fused' if conditions.fuse else 'not fused'}{delayed}"


def check_plan(
    net: Net | Sequence[Net] | Callable[[], Net | Sequence[Net]],
    input_shape: Shape | Sequence[Shape],
    plan: AnyPlan = None,
    *,
    pipeline_schedule: str | Schedule = "1f1b",
    meshes: Sequence[Mapping[str, int]] | None = None,
    comm: Communicator | None = None,
    prepare: Callable[[Model], Any] | None = None,
    backend: str = "cpu",
    batch: int = 5,
    tolerance: float = 1e-12,
    seed: int = 0,
    timeout: float = 60.0,
) -> PlanReport:
    """Check that a network computes the same under a plan as serially, on several meshes.

    Each mesh trains the network for three steps in float64, with SGD and momentum, fused and not,
    and evaluates it. Samples are divided unevenly over the axis "data", along which batch norm is
    synchronised, except in the stages of a pipeline. Every rank's part must agree with serial
    training: outputs, the gradient of the input, the gradients of all parameters, running
    statistics and parameters. Ranks with the same part of an array must have the same bytes of it,
    and no rank may use the array of a message in progress. Everything is repeated with random
    delays between the ranks, which must not change a byte.

    Parameters
    ----------
    net : Layer, Block, sequence of them, or callable
        The network; or a function that returns it, which is called for each model.
    input_shape : tuple of int, or tuple of such tuples
        Odd sizes give uneven parts.
    plan : Plan, mapping or str, optional
        See `Model`.
    pipeline_schedule : Schedule or str
        See `Model`; checked first, see `pydtnn.model.pipeline.check`.
    meshes : sequence of mappings of str to int, optional
        Axes of each mesh: ``[{"filter": 3}, {"data": 2, "filter": 2}]``. By default 2, 3 and 4
        ranks along an only axis of the plan, or 2 and 3 along each of several, and 2 ranks along
        "data" besides; those for which the plan is not possible are left out.
    comm : Communicator, optional
        The ranks, on each of which this is called, such as those of MPI. By default the ranks are
        threads.
    prepare : callable, optional
        Called with each model before it is used: ``lambda model: model.freeze("stem")``.
    backend : str
    batch : int
        Samples of a step.
    tolerance : float
        Largest difference from serial training, relative to the largest magnitude of arrays of the
        same kind.
    seed : int
        Seed of the data and the initial weights.
    timeout : float
        Maximum duration of one run of threads, in s.

    Returns
    -------
    PlanReport
        Differences, messages and bytes; `str` of it is a table.

    Raises
    ------
    AssertionError
        With the layer, the quantity that is wrong, the difference and the mesh. The layer is the
        first in the order of execution whose output differs; if outputs agree, the last whose
        gradient differs.
    ValueError
        If the plan is not possible for the network and the mesh.

    Examples
    --------
    >>> from pydtnn.layers import Conv2d, Flatten, Linear, ReLU
    >>> net = [Conv2d(4, 3), ReLU(), Flatten(), Linear(3)]
    >>> report = check_plan(net, (5, 7, 2), "spatial", meshes=[{"spatial": 2}])
    >>> report.rows[0].differences["gradient"] < 1e-12
    True
    """
    check_float("check_plan", "tolerance", tolerance, above=0)
    problem = Problem(
        _factory(net),
        input_shape,
        ArrayDataset(np.zeros((1, 1)), np.zeros((1, 1))),  # replaced below
        check_int("check_plan", "batch", batch, at_least=1),
        STEPS,
        partial(SGD, LR, momentum=MOMENTUM),
        plan=plan,
        pipeline_schedule=pipeline_schedule,
        backend=backend,
        seed=check_int("check_plan", "seed", seed, at_least=0),
        prepare=prepare,
    )
    losses = tuple(LinearLoss() for _ in problem.model(None, Conditions()).output_shapes)
    problem = replace(problem, data=_dataset(problem, STEPS * batch), loss=losses)

    @cache
    def serial(batch: int, conditions: Conditions) -> Trajectory:
        return train_serially(replace(problem, batch=batch), conditions)

    rows: list[PlanRow] = []
    size = None if comm is None else comm.size
    default = _meshes(plan, pipeline_schedule, size) if meshes is None else ()
    for axes in default if meshes is None else meshes:
        stages = _checked(axes, comm).get(PIPELINE)
        case = PlanCase(problem, serial, axes, comm=comm, tolerance=tolerance, timeout=timeout)
        refused = case.refusal()
        if refused and meshes is not None:
            raise ValueError(refused)
        if stages and not refused:
            check_schedule(pipeline_schedule, stages, 2 * stages)
        rows.append(PlanRow(dict(axes), {}, refused=refused) if refused else case.check())
    if all(row.refused for row in rows):
        raise ValueError(rows[0].refused)
    parameters = problem.model(None, Conditions()).parameters.values()
    name = plan if isinstance(plan, str) else "plan"
    return PlanReport(name, sum(p.size for p in parameters), batch, tuple(rows))


def _dataset(problem: Problem, samples: int) -> ArrayDataset:
    """Return random samples and targets for a model of the network."""
    model, rng = problem.model(None, Conditions()), np.random.default_rng([problem.seed, samples])
    x = example_inputs(model, samples, rng)
    y = tuple(rng.normal(size=(samples, *shape)) for shape in model.output_shapes)
    return ArrayDataset(x if len(x) > 1 else x[0], y if len(y) > 1 else y[0])


def _factory(net: Net | Sequence[Net] | Callable[[], Net | Sequence[Net]]) -> Callable[[], Net]:
    """Return a function that returns new layers.

    Raises
    ------
    TypeError
        If `net` is neither a layer, block, list of them nor a function.
    """

    def make() -> Net:
        layers: Any = copy.deepcopy(net) if isinstance(net, given) else net()  # type: ignore[operator]
        return Sequential(*layers) if isinstance(layers, list | tuple) else layers

    given = Layer | Block | list | tuple
    if not (isinstance(net, given) or callable(net)):
        raise TypeError(
            "check_plan: expected a layer, a block, a list of them or a function that returns "
            f"one, got {net!r}"
        )
    return make


def _checked(axes: Mapping[str, int], comm: Communicator | None) -> Mapping[str, int]:
    if not isinstance(axes, Mapping) or not axes:
        raise TypeError(
            f'check_plan: expected meshes such as {{"filter": 2}} or {{"data": 2, "filter": 2}}, '
            f"got {axes!r}"
        )
    for name, ranks in axes.items():
        check_int("check_plan", name, ranks, at_least=1)
    ranks = prod(axes.values())
    if ranks > MAX_RANKS or (comm is not None and ranks != comm.size):
        limit = f"at most {MAX_RANKS}" if comm is None else f"the {comm.size} of comm"
        raise ValueError(f"check_plan: expected ranks of a mesh to be {limit}, got {dict(axes)}")
    return axes


def _meshes(plan: AnyPlan, schedule: str | Schedule, ranks: int | None) -> list[dict[str, int]]:
    """Return the default meshes for the axes that a plan names."""
    if plan is None:
        raise ValueError(
            "check_plan: expected a plan or meshes, got neither; use meshes=[{'filter': 2}]"
        )
    stages = 0
    if isinstance(plan, str) and plan in (*NAMES, PIPELINE):
        axes = ["model" if plan == "data" else plan]
    else:
        known = find_plan(plan, (), pipeline=True)
        axes = [*dict.fromkeys(axis for own in known.rules.values() for axis in own.values())]
        if known.stages:
            numbers = range(1, len(known.stages) + 2)
            fitting = (n for n in numbers if is_possible(schedule, n))
            enough = (n for n in fitting if placement(schedule, n).stages > len(known.stages))
            stages = next(enough, 0)
    twice = dict.fromkeys(axes, 2)
    if len(axes) == 1:
        found = [{axes[0]: n} for n in (2, 3, 4)]
    else:
        found = [twice, *({**twice, axis: 3} for axis in axes)]
    found.append({"data": 2, **twice})
    if stages:
        found = [{**mesh, PIPELINE: stages} for mesh in found] if axes else [{PIPELINE: stages}]
    return [mesh for mesh in found if ranks in (None, prod(mesh.values()))]

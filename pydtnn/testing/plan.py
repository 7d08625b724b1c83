"""Check of the parallel execution of a network under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from pydtnn.comm import Communicator
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import Net
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model import Model
from pydtnn.model.partition.plan import NAMES, find_plan
from pydtnn.testing.plan_case import Case, PlanReport, PlanRow
from pydtnn.testing.plan_rank import AnyPlan, Problem, Rank, factory_of
from pydtnn.utils.validate import check_float, check_int

MOST_RANKS = 64


def check_plan(
    net: Net | Sequence[Net] | Callable[[], Net | Sequence[Net]],
    input_shape: Shape | Sequence[Shape],
    plan: AnyPlan = None,
    *,
    meshes: Sequence[Mapping[str, int]] | None = None,
    comm: Communicator | None = None,
    prepare: Callable[[Model], Any] | None = None,
    backend: str = "cpu",
    batch: int = 5,
    tolerance: float = 1e-12,
    seed: int = 0,
    timeout: float = 60.0,
    training: bool = False,
) -> PlanReport:
    """Check that a network computes the same under a plan as serially, on several meshes.

    Each mesh trains the network for three steps in float64, with SGD and momentum, fused and not,
    and evaluates it. Samples are divided unevenly over the axis "data", along which batch norm is
    synchronised. Every rank's part must agree with serial training: outputs, the gradient of the
    input, the gradients of all parameters, running statistics and parameters. Ranks with the same
    part of an array must have the same bytes of it. Everything is repeated with random delays
    between the ranks, which must not change a byte.

    With `training`, ten steps of a `Trainer` are compared with serial training as well: batches,
    the last of an epoch with a single sample, micro-batches of different lengths, sums of
    gradients, clipping to the median norm, momentum and weight decay. Batch norm then normalises
    each micro-batch and, in a second run, the batch of all ranks (not in stages).

    Parameters
    ----------
    net : Layer, Block, sequence of them, or callable
        The network; or a function that returns it, which is called for each model.
    input_shape : tuple of int, or tuple of such tuples
        Odd sizes give uneven parts.
    plan : Plan, mapping or str, optional
        See `Model`.
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
    training : bool
        Whether to check the training loop, too.

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
        factory_of(net),
        input_shape,
        plan,
        backend,
        check_int("check_plan", "batch", batch, at_least=1),
        check_int("check_plan", "seed", seed, at_least=0),
        prepare,
    )
    asked = _meshes(plan, None if comm is None else comm.size) if meshes is None else meshes
    serial = Rank(problem, None, fuse=False)
    course = serial.run()
    rows: list[PlanRow] = []
    for axes in asked:
        case = Case(
            problem,
            course,
            _checked(axes, comm),
            comm=comm,
            tolerance=tolerance,
            timeout=timeout,
            training=training,
        )
        refused = case.refusal()
        if refused and meshes is not None:
            raise ValueError(refused)
        rows.append(PlanRow(dict(axes), {}, refused=refused) if refused else case.check())
    if all(row.refused for row in rows):
        raise ValueError(rows[0].refused)
    parameters = sum(p.size for p in serial.model.parameters.values())
    name = plan if isinstance(plan, str) else "plan"
    return PlanReport(name, parameters, batch, tuple(rows))


def _checked(axes: Mapping[str, int], comm: Communicator | None) -> Mapping[str, int]:
    if not isinstance(axes, Mapping) or not axes:
        raise TypeError(
            f'check_plan: expected meshes such as {{"filter": 2}} or {{"data": 2, "filter": 2}}, '
            f"got {axes!r}"
        )
    for name, ranks in axes.items():
        check_int("check_plan", name, ranks, at_least=1)
    ranks = prod(axes.values())
    if ranks > MOST_RANKS or (comm is not None and ranks != comm.size):
        limit = f"at most {MOST_RANKS}" if comm is None else f"the {comm.size} of comm"
        raise ValueError(f"check_plan: expected ranks of a mesh to be {limit}, got {dict(axes)}")
    return axes


def _meshes(plan: AnyPlan, ranks: int | None) -> list[dict[str, int]]:
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
        stages = len(known.stages) + 1 if known.stages else 0
    twice = dict.fromkeys(axes, 2)
    if len(axes) == 1:
        found = [{axes[0]: n} for n in (2, 3, 4)]
    else:
        found = [twice, *({**twice, axis: 3} for axis in axes)]
    found.append({"data": 2, **twice})
    if stages:
        found = [{**mesh, PIPELINE: stages} for mesh in found] if axes else [{PIPELINE: stages}]
    return [mesh for mesh in found if ranks in (None, prod(mesh.values()))]

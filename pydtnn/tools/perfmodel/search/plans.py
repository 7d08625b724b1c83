"""Search of a plan for each layer, compared with the best plans that use one strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import Any

from pydtnn.tools.perfmodel.messages import MessageCosts
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search.layouts import AXIS, LayerOptions
from pydtnn.tools.perfmodel.search.solver import Solution, solve
from pydtnn.training.workload import SHARDED, Workload
from pydtnn.utils.units import memory

EXPOSED = (0.0, 0.5, 1.0)
"""Shares of the sums of gradients that count in a search: backward hides some of them."""

SCHEDULES = (
    *("1f1b", "eager_1f1b", "interleaved:2", "zb_h1", "zb_2p", "zb_v", "chimera", "dualpipe"),
)
"""Schedules of pipelines that are compared; `gpipe` is never faster than 1F1B."""

UNIFORM = ("spatial", "filter", "channel", "alternate", "context", "expert")
"""Strategies that are used for all layers, besides data parallelism."""

Rules = dict[str, dict[str, str]]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes
    ----------
    best : Prediction
        The fastest within the limit of memory.
    uniform : Prediction or None
        The fastest of those with one strategy for all layers; None if none fits.
    tried : tuple of Prediction
        All of them, the fastest first; those that do not fit last.
    """

    best: Prediction
    uniform: Prediction | None
    tried: tuple[Prediction, ...]

    @property
    def gain(self) -> float:
        """Time of the best uniform plan over that of the best one."""
        return inf if self.uniform is None else self.uniform.seconds / self.best.seconds

    def with_predictions(self, ones: Sequence[Prediction]) -> SearchResult:
        """Return a result of better predictions of some of the strategies that are possible."""
        if not ones:
            return self

        def strategy(one: Prediction) -> tuple[Any, ...]:
            work = one.work
            return work.axes, work.plan, work.recompute, work.pipeline_schedule, work.scheme

        better = [*map(strategy, ones)]
        others = [one for one in self.tried if strategy(one) not in better]
        ordered = sorted(ones, key=lambda one: one.seconds)
        plain = next((one for one in ordered if one.work.plan is None), self.uniform)
        return SearchResult(ordered[0], plain, (*ordered, *others))

    def prefer_uniform(self, gain: float) -> SearchResult:
        """Return a result whose best strategy is the uniform one if the other gains less."""
        if self.uniform is None or self.gain >= gain:
            return self
        return replace(self, best=self.uniform)


def search(
    projector: Projector,
    ranks: int,
    works: Iterable[Workload] | None = None,
    *,
    memory_limit: float | None = None,
    recompute: Sequence[Any] = (None, "auto"),
    schedules: Sequence[str] = ("1f1b",),
) -> SearchResult:
    """Return the fastest way to distribute a network, with plans for each layer among them.

    For each mesh ``data=d,model=p``, dynamic programming finds the fastest plan, and within a limit
    of memory also slower ones with less. All of them, and all uniform strategies, are projected as
    whole steps, with overlap and fusion; by that model, the result is therefore never slower than
    the best uniform one. Where memory requires it, ranks along "data" that allreduce gradients have
    sharded schemes.

    Parameters
    ----------
    projector : Projector
    ranks : int
    works : iterable of Workload, optional
        Only these strategies, the network and batch of the projector with other axes and plans.
    memory_limit : float, optional
        Of a rank, in B; by default that of the platform.
    recompute : sequence
        Values of `Model`'s argument that are tried, until the memory is within the limit.
    schedules : sequence of str
        Schedules of pipelines that are tried.

    Raises
    ------
    ValueError
        If no strategy is possible within the limit, or there is no formula for the run.
    """
    limit = projector.platform.cluster.memory_per_rank if memory_limit is None else memory_limit
    projector.check(projector.work)
    tried: list[Prediction] = []
    for work in _all_works(projector, ranks, limit) if works is None else works:
        for schedule in schedules if work.stages > 1 else schedules[:1]:
            one = replace(work, pipeline_schedule=schedule, memory_limit=None)
            tried += _until(limit, projector, one, recompute)
    tried.sort(key=lambda one: (one.memory.total > limit, one.seconds, one.memory.total))
    possible = [one for one in tried if one.memory.total <= limit]
    if not tried:
        raise ValueError(
            f"search: expected a network that can be cut over {ranks} ranks, got "
            f"{projector.work.network} with a global batch of {projector.work.batch}; use "
            "fewer ranks"
        )
    if not possible:
        least = min(one.memory.total for one in tried)
        raise ValueError(
            f"search: expected a memory limit of at least {memory(least)} per rank, got "
            f"{memory(limit)}; use more ranks or a smaller batch"
        )
    plain = next((one for one in possible if one.work.plan is None), None)
    return SearchResult(possible[0], plain, tuple(tried))


def _all_works(projector: Projector, ranks: int, limit: float) -> Iterator[Workload]:
    """Yield a run with all uniform strategies, and with plans for each layer."""
    work = projector.work
    for axes in uniform(ranks, work.batch):
        one = work.along(axes)
        if one.stages <= work.batch // one.data:
            yield one
    for mesh in meshes(ranks, work.batch):
        for rules in plans_for(projector, mesh, limit):
            yield work.along(mesh, plan=rules)


def _until(
    memory_limit: float, projector: Projector, work: Workload, recompute: Sequence[Any]
) -> Iterator[Prediction]:
    """Yield predictions that need less and less memory, until one is within a limit.

    Those of sharded schemes follow if allreduce is within the limit with recomputation at most,
    which takes time.
    """
    sharded = SHARDED if work.scheme == "allreduce" and work.data > 1 and not work.compress else ()
    for scheme in (work.scheme, *sharded):
        for again in recompute:
            try:
                one = projector.project(replace(work, scheme=scheme, recompute=again))
            except ValueError:  # the network has too few filters, rows or layers
                return
            yield one
            if one.memory.total <= memory_limit:
                if again == recompute[0]:
                    return
                break


def meshes(ranks: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the meshes with the axes "data" and "model", with several ranks along the latter."""
    for groups in range(1, min(ranks // 2, batch) + 1):
        if ranks % groups == 0:
            yield {"data": groups, AXIS: ranks // groups}


def uniform(ranks: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield axes that cut all layers in one way, with samples along the axis "data"."""
    if ranks <= batch:
        yield {"data": ranks}
    for mesh in meshes(ranks, batch):
        for name in (*UNIFORM, "pipeline"):
            yield {"data": mesh["data"], name: mesh[AXIS]}


def plans_for(projector: Projector, mesh: Mapping[str, int], limit: float = inf) -> list[Rules]:
    """Return plans for a mesh: the fastest, and within the limit those with less memory.

    Networks that use a layer several times have none.
    """
    try:
        work = replace(projector.work, axes=mesh)
        options = LayerOptions(projector, MessageCosts(projector.platform, work))
    except ValueError:
        return []
    found: list[Rules] = []
    for options.exposed in EXPOSED:
        solutions = solve(options.units, options)
        if any(solution.memory > limit for solution in solutions):
            solutions += _spread(solve(options.units, options, memory_limit=limit, most=16))
        found += [rules_of(options, solution) for solution in solutions]
    return [rules for i, rules in enumerate(found) if rules and rules not in found[:i]]


def _spread(solutions: list[Solution]) -> list[Solution]:
    """Return the fastest solution, the one with the least memory, and one between them."""
    places = {0, len(solutions) // 2, len(solutions) - 1} if solutions else ()
    return [solutions[i] for i in sorted(places)]


def rules_of(options: LayerOptions, solution: Solution) -> Rules:
    """Return the rules of a `Plan`: the strategy of each layer that does not follow its inputs."""
    chosen = zip(options.units, solution.names, strict=True)
    return {unit.name: {strategy: AXIS} for unit, strategy in chosen if strategy}


def describe(rules: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the strategies in words: runs of layers with the same one, in their order.

    >>> describe({"c1": {"spatial": "x"}, "c2": {"spatial": "x"}, "fc": {"filter": "x"}})
    ['c1 to c2: spatial', 'fc: filter']
    """
    lines = []
    for strategy, run in groupby(rules, key=lambda name: ", ".join(rules[name]) or "whole"):
        first, *others = run
        names = f"{first} to {others[-1]}" if others else first
        lines.append(f"{names}: {strategy}")
    return lines

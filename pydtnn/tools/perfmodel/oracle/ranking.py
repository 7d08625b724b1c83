"""Strategies for a number of ranks, and their projections, ranked by the time of an epoch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import combinations
from math import ceil, log, nan, prod
from typing import Any

from pydtnn.layers.collectives import PIPELINE
from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.prediction import MemoryUse, Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import SHARDED, Workload
from pydtnn.utils.units import memory

AXES = ("spatial", "filter", "channel", "tensor", "context", "expert", PIPELINE)
"""Axes that are combined with "data"."""

KINDS = ("data", *AXES)
"""Kinds of strategies: data parallelism, and that of each axis, alone or with data."""

MAX_PARTS = 128
"""Parts of a layer in an enumeration: the layers of few networks can be cut into more."""

MAX_STAGES = 8
"""Stages of a pipeline in an enumeration: longer ones wait more than they compute."""

MAX_BLOCK_STAGES = 16
"""Those of networks with many equal blocks."""


@dataclass(frozen=True)
class Variants:
    """What is tried besides the axes.

    Parameters
    ----------
    recompute : bool
        Also with recomputation.
    sharded : bool
        Also with the schemes of `SHARDED`, where there are several ranks along "data".
    compress : sequence of str
        Also with these compressors of gradients.
    schedules : sequence of str
        Of pipelines; by default that of the run.
    """

    recompute: bool = True
    sharded: bool = True
    compress: Sequence[str] = ()
    schedules: Sequence[str] = ()

    def of(self, work: Workload) -> Iterator[Workload]:
        """Yield a run and its variants."""
        schedules = self.schedules if work.stages > 1 else ()
        for schedule in schedules or (work.pipeline_schedule,):
            yield from self._of(replace(work, pipeline_schedule=schedule))

    def _of(self, work: Workload) -> Iterator[Workload]:
        yield work
        if self.recompute:
            yield replace(work, recompute="auto")
        if work.data > 1:
            for scheme in SHARDED if self.sharded else ():
                yield replace(work, scheme=scheme)
            for name in self.compress:
                yield replace(work, compress=name)


def strategies(
    work: Workload,
    ranks: int,
    kinds: Sequence[str] = KINDS,
    variants: Variants | None = None,
    *,
    most: int = 1,
    stages: int = MAX_STAGES,
) -> Iterator[Workload]:
    """Yield a run with all strategies for a number of ranks: "data", other axes, and hybrids.

    Parameters
    ----------
    work : Workload
    ranks : int
    kinds : sequence of str
        Of `KINDS`; hybrids of "data" with another axis are included if both are.
    variants : Variants, optional
    most : int
        Largest number of axes besides "data"; "tensor" is not combined with "filter" or "channel".
    stages : int
        Largest number of stages of a pipeline.

    Raises
    ------
    ValueError
        If a kind is unknown.

    Examples
    --------
    >>> found = strategies(Workload("mlp", (4,)), 4, ("data", "filter"), Variants(False, False))
    >>> [work.strategy for work in found]
    ['data 4', 'data 2 x filter 2', 'filter 4']
    """
    for kind in kinds:
        check("oracle", "strategy", kind, KINDS)
    variants = variants or Variants()
    if ranks == 1:
        yield from variants.of(work.along({}))
        return
    if "data" in kinds:
        yield from variants.of(work.along({"data": ranks}))
    others = [axis for axis in kinds if axis in AXES]
    for number in range(1, most + 1):
        for axes in combinations(others, number):
            if "tensor" in axes and {"filter", "channel"}.intersection(axes):
                continue  # tensor parallelism divides filters and channels itself
            for parts in _factorisations(ranks, axes, stages):
                data = ranks // prod(parts)
                if data == 1 or "data" in kinds:
                    mesh = dict(zip(axes, parts, strict=True))
                    yield from variants.of(work.along({"data": data, **mesh}))


def _factorisations(
    ranks: int, axes: Sequence[str], stages: int = MAX_STAGES
) -> Iterator[tuple[int, ...]]:
    """Yield the ranks along each axis, at least 2, whose product divides a number of ranks.

    >>> [*_factorisations(8, ("filter", "spatial"))]
    [(2, 2), (2, 4), (4, 2)]
    """
    if not axes:
        yield ()
        return
    largest = stages if axes[0] == PIPELINE else MAX_PARTS
    for part in range(2, min(ranks, largest) + 1):
        if ranks % part == 0:
            for rest in _factorisations(ranks // part, axes[1:], stages):
                yield part, *rest


SLACK = 0.95
"""Part of the lower bounds of strategies that none falls below: kernels of other lengths."""

TERMS = (
    *("forward", "backward", "recomputed", "other", "update", "layers_exposed"),
    *("gradients_exposed", "idle", "busy"),
)
"""Times of a step in a table's row: attributes of `StepTime`."""


@dataclass(frozen=True)
class Entry:
    """A strategy and its prediction.

    Attributes
    ----------
    work : Workload
    projection : Prediction or None
        None if the strategy is not possible.
    reason : str
        Why it is not possible, or what does not fit; empty if it is.
    efficiency : float
        Time of one rank for the same samples, divided by the ranks and by the time of the strategy.
    node_hours : float
        Hosts times hours of an epoch.
    least : float
        Time of a step that a strategy exceeds that was not followed, in s.
    virtual : float
        Time of a step on virtual ranks over that of the prediction; nan if they did not execute it.
    """

    work: Workload
    projection: Prediction | None
    reason: str = ""
    efficiency: float = 0.0
    node_hours: float = 0.0
    least: float = 0.0
    virtual: float = nan

    @property
    def possible(self) -> bool:
        """Whether the strategy fits the network, the batch and the memory."""
        return not self.reason

    @property
    def bottleneck(self) -> str:
        """The part of a step that takes the most time; empty without a projection."""
        return "" if self.projection is None else self.projection.bottleneck

    def to_json(self) -> dict[str, Any]:
        """Return numbers in SI units and words, as one row of a table."""
        row: dict[str, Any] = {
            "ranks": self.work.ranks,
            "strategy": self.work.strategy,
            "parallel": self.work.parallel,
            "possible": self.possible,
            "reason": self.reason,
        }
        one = self.projection
        if one is None:
            return row
        parts = {f"memory_{name}": size for name, size in asdict(one.memory).items()}
        return row | {
            "samples_per_rank": one.work.samples_per_rank,
            "global_batch": one.work.batch,
            "seconds_per_step": one.seconds,
            "seconds_per_epoch": one.epoch,
            "samples_per_second": one.throughput,
            **{name: getattr(one.step, name) for name in TERMS},
            "loader": one.loader,
            "checkpoint": one.checkpoint,
            "memory": one.memory.total,
            **parts,
            "efficiency": self.efficiency,
            "node_hours": self.node_hours,
            "bottleneck": self.bottleneck,
        }


class Oracle:
    """Ranks the strategies of a run on a platform.

    Parameters
    ----------
    projector : Projector
    per_rank : int, optional
        Samples of each rank: weak scaling, with a global batch of that many times the ranks. By
        default the global batch of the run: strong scaling.
    """

    def __init__(self, projector: Projector, per_rank: int | None = None) -> None:
        self.projector, self.per_rank = projector, per_rank
        self._limit = projector.platform.cluster.memory_per_rank
        self._serial: dict[int, float] = {}

    def serial_rate(self, batch: int) -> float:
        """Return the samples per second of one rank, whatever memory it needs."""
        if batch not in self._serial:
            work = self.projector.work.along({}, batch=batch)
            self._serial[batch] = self.projector.project(work).throughput
        return self._serial[batch]

    def _scaled(self, work: Workload) -> Workload:
        return work if self.per_rank is None else replace(work, batch=self.per_rank * work.ranks)

    def entry(self, work: Workload) -> Entry:
        """Predict training; the reason says why it is not possible, if so."""
        work, cluster = self._scaled(work), self.projector.platform.cluster
        try:
            one = self.projector.project(work)
        except ValueError as error:
            return Entry(work, None, str(error))
        reason, hosts = self._excess(one.memory), ceil(work.ranks / cluster.ranks_per_host)
        return Entry(
            work,
            one,
            reason,
            efficiency=one.throughput / work.ranks / self.serial_rate(self.per_rank or work.batch),
            node_hours=hosts * one.epoch / 3600,
        )

    def _excess(self, *ranks: MemoryUse) -> str:
        """Return a text if the memory of a rank does not suffice; empty if it does."""
        most, limit = max(ranks, key=lambda one: one.total), self._limit
        text = f"{most.largest}: a rank needs {memory(most.total)} of {memory(limit)}"
        return text if most.total > limit else ""

    def _bounds(self, work: Workload) -> Iterator[tuple[float, str]]:
        """Yield times that a step exceeds, later ones closer, and why it is not possible, if so."""
        least, limit = self.projector.least, self._limit
        for together in (False, True)[: max(len(work.cut), 1)]:
            seconds, size = (SLACK * one for one in least(work, together=together))
            reason = f"a rank needs at least {memory(size)} of {memory(limit)}"
            yield seconds, reason if size > limit else ""
        if work.memory_limit is None:  # or less is computed again
            yield 0.0, self._excess(*self.projector.memories(work))
            if work.stages > 1:
                yield self.projector.least_of_stages(work), ""

    def fastest(self, works: Iterable[Workload], top: int) -> Iterator[Entry]:
        """Predict runs, those with the shortest bounds first.

        What can neither fit nor be among the `top` fastest ones by its bounds is not followed.
        """
        times, scaled = list[float](), [*map(self._scaled, works)]
        queue = [(0.0, number, self._bounds(work)) for number, work in enumerate(scaled)]
        while queue:  # it is a heap
            seconds, number, bounds = heappop(queue)
            work = scaled[number]
            if len(times) >= top and seconds > times[top - 1]:
                yield Entry(work, None, "slower by its bounds, not followed", least=seconds)
                continue
            try:
                closer, reason = next(bounds, (None, ""))
            except ValueError as error:
                closer, reason = None, str(error)
            if reason:
                yield Entry(work, None, reason)
            elif closer is not None:
                heappush(queue, (max(seconds, closer), number, bounds))
            else:
                entry = self.entry(work)
                if entry.possible and entry.projection is not None:
                    insort(times, entry.projection.seconds)
                yield entry

    def rank(self, found: Iterable[Workload]) -> list[Entry]:
        """Predict runs; possible ones first, in the order of the time of an epoch."""
        return sort_entries(map(self.entry, found))

    def sweep(
        self,
        ranks: Sequence[int],
        kinds: Sequence[str] = KINDS,
        variants: Variants | None = None,
        *,
        most: int = 1,
    ) -> dict[int, list[Entry]]:
        """Rank all strategies for each of several numbers of ranks; see `strategies`."""
        work = self.projector.work
        return {n: self.rank(strategies(work, n, kinds, variants, most=most)) for n in ranks}


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order of the time of an epoch, those that are not possible last.

    Of entries that differ by less than about 1 %, those with fewer variants come first.
    """

    def key(entry: Entry) -> tuple[bool, bool, float, bool, float]:
        one, work = entry.projection, entry.work
        if one is None:
            return not entry.possible, True, 0.0, False, 0.0
        variant = work.recompute is not None or work.scheme != "allreduce"
        times = round(100 * log(one.epoch)), variant or bool(work.compress), one.epoch
        return not entry.possible, False, *times

    return sorted(entries, key=key)


def best(entries: Sequence[Entry]) -> Entry | None:
    """Return the fastest entry that is possible."""
    return next((entry for entry in entries if entry.possible), None)

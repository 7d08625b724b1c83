"""Figures in the manner of papers, from a file: ``python -m pydtnn oracle paper FILE.yaml``.

References
----------
Castelló et al., Performance modeling for distributed training of convolutional neural networks, PDP
2021: curves over the properties of a platform. Kahira et al., An oracle for guiding large-scale
model/hybrid parallel training of convolutional neural networks, HPDC 2021: limits and bottlenecks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.parallel.mesh import parse_axes
from pydtnn.tools.perfmodel import fields
from pydtnn.tools.perfmodel.compute import ComputeCosts
from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle import table
from pydtnn.tools.perfmodel.oracle.ranking import KINDS, Entry
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, Sweep, first_axis, label
from pydtnn.tools.perfmodel.virtual.steps import MAX_RANKS, predict
from pydtnn.training.workload import Workload
from pydtnn.utils.units import parse_shape

PARTS = "parts of a step"

DRAWN = (*table.QUANTITIES, PARTS)
"""What a figure can show: curves of the first two, or bars."""


@dataclass(frozen=True)
class Axes:
    """Values of the axes of a figure, a panel for each; the names are those of `SWEEPS`."""

    batch: Sequence[int] = fields.counts(default=())
    flops: Sequence[float] = fields.lists("flop/s")
    memory: Sequence[float] = fields.lists("B/s")
    bandwidth: Sequence[float] = fields.lists("B/s")
    latency: Sequence[float] = fields.lists("s")
    ranks: Sequence[int] = fields.counts(default=())


@dataclass(frozen=True)
class PublishedSpeedUp:
    """The speed-up over one rank that others have measured with a strategy, such as data=12."""

    strategy: str = fields.text()
    speed_up: float = fields.positive()


@dataclass(frozen=True)
class Paper:
    """A figure.

    Attributes
    ----------
    title : str
    network, shape, platform : str
        As the options of the oracle; files of platforms are relative to that of the figure.
    strategies : sequence of str
        Such as data=4,filter=2; all with as many ranks.
    axes : Axes
    classes : int
    batch, batch_per_rank : int or None
        Samples of a step, of all ranks or of each.
    bucket_bytes : int or None
        Length of messages with gradients.
    draw : str
        One of `DRAWN`.
    virtual : int
        Of so many values of each axis, virtual ranks execute the step, too.
    measured : sequence of PublishedSpeedUp
    """

    title: str = fields.text()
    network: str = fields.text()
    shape: str = fields.text()
    platform: str = fields.text()
    strategies: Sequence[str] = fields.texts()
    axes: Axes = fields.part(Axes)
    classes: int = fields.count(default=1000)
    batch: int | None = fields.count(default=None)
    batch_per_rank: int | None = fields.count(default=None)
    bucket_bytes: int | None = fields.count(default=None)
    draw: str = fields.text(default=DRAWN[0])
    virtual: int = fields.index(default=0)
    measured: Sequence[PublishedSpeedUp] = fields.parts(PublishedSpeedUp)

    def __post_init__(self) -> None:
        """Check what the kinds of the entries do not."""
        check("draw", "figure", self.draw, DRAWN)
        if (self.batch is None) == (self.batch_per_rank is None):
            raise ValueError("batch: expected either batch or batch_per_rank; write one of them")
        if not any(vars(self.axes).values()):
            raise ValueError(f"axes: expected values of {', '.join(SWEEPS)}, got none; add some")
        if self.measured and self.draw != DRAWN[1]:
            raise ValueError(f"measured: expected draw: {DRAWN[1]}, got {self.draw}; correct it")
        ranks = {work.strategy: work.ranks for work in self.works}
        if len(ranks) < len(self.strategies) or len({*ranks.values()}) != 1:
            raise ValueError("strategies: expected different ones for as many ranks; correct them")
        for one in self.measured:
            mesh_of("measured", one.strategy)

    @property
    def works(self) -> list[Workload]:
        """The run with each of the strategies."""
        shape, batch = parse_shape("shape", self.shape), self.batch or self.batch_per_rank or 1
        work = Workload(self.network, shape, self.classes, batch, bucket_bytes=self.bucket_bytes)
        return [replace(work, axes=mesh_of("strategies", one)) for one in self.strategies]

    def limits(self, backend: Backend) -> dict[str, table.Limit]:
        """Return the limit of the first axis of each strategy, by the label of the strategy."""
        known = {one.kind: one for one in table.find_limits(self.works[0], backend)}
        found: dict[str, table.Limit] = {}
        for name, work in ((label(work), work) for work in self.works):
            one = known.get(first_axis(work))
            if one and not (one.kind == "data" and self.batch_per_rank):
                ranks = one.ranks * work.ranks // work.axes[one.kind]
                found[name] = replace(one, kind=name, ranks=ranks)
        return found

    def measured_with(self, work: Workload) -> float:
        """Return the speed-up that was measured with a strategy; nan if it was not."""
        own = {name: ranks for name, ranks in work.axes.items() if ranks > 1}
        known = (one for one in self.measured if mesh_of("measured", one.strategy) == own)
        return next((one.speed_up for one in known), nan)

    def notes(self, entry: Entry) -> dict[str, str]:
        """Return further cells of an entry in the printed table, by the name of their row."""
        if entry.projection and self.draw == PARTS:
            parts = entry.projection.step.parts(entry.projection.loader)
            return {"  most of a step": max(parts, key=parts.__getitem__)}
        known = self.measured_with(entry.work)
        ratio = table.value_of(entry, self.draw) / known
        found = {"  measured": known, "  predicted / measured": ratio}
        return {} if isnan(ratio) else {name: f"{value:.2f}" for name, value in found.items()}


def mesh_of(who: str, text: str) -> dict[str, int]:
    """Return the axes of a strategy with their ranks; ValueError if there is no such strategy."""
    axes = parse_axes(f"{who}:", text)
    for name in axes:
        check(who, "axis", name, KINDS)
    return {"data": 1, **axes}


def on_virtual_ranks(found: Sweep, count: int, costs: ComputeCosts) -> Sweep:
    """Return a sweep with the times of virtual ranks for some of its values.

    Parameters
    ----------
    found : Sweep
    count : int
        Of values with ranks that `predict` can execute: the first, the last and others between
        them.
    costs : ComputeCosts
        On any platform.
    """
    virtual: dict[str, dict[int, float]] = {name: {} for name in found.entries}
    for name, entries in found.entries.items():
        known = [(i, one.projection) for i, one in enumerate(entries) if one.projection]
        able = [(i, one) for i, one in known if one.work.ranks <= MAX_RANKS or one.work.data > 1]
        places = np.linspace(0, len(able) - 1, min(count, len(able))).round().astype(int)
        for i, one in (able[place] for place in places):
            try:
                step = predict(one.work.in_micro_batches(), one.platform, costs.on(one.platform))
            except ValueError:
                if one.work.ranks <= MAX_RANKS:
                    raise
                continue  # these ranks are not alike
            virtual[name][i] = step.seconds / one.seconds
    return replace(found, virtual=virtual)

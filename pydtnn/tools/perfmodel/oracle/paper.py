"""Figures in the manner of papers, from a file: ``python -m pydtnn oracle paper FILE.yaml``.

References
----------
Castelló et al., Performance modeling for distributed training of convolutional neural networks, PDP
2021: curves over the properties of a platform. Kahira et al., An oracle for guiding large-scale
model/hybrid parallel training of convolutional neural networks, HPDC 2021: limits and bottlenecks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.tools.perfmodel import fields
from pydtnn.tools.perfmodel.compute import AnalyticCosts, ComputeCosts
from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle import table
from pydtnn.tools.perfmodel.oracle.options import axes_of
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, Sweep, first_axis, label, sweep
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.virtual.steps import MAX_RANKS, predict
from pydtnn.tools.schedules.figures import INK, LINE, PALETTE, QUIET, check_figure, save_figure
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
            axes_of("measured", one.strategy)

    @property
    def works(self) -> list[Workload]:
        """The run with each of the strategies."""
        shape, batch = parse_shape("shape", self.shape), self.batch or self.batch_per_rank or 1
        work = Workload(self.network, shape, self.classes, batch, bucket_bytes=self.bucket_bytes)
        return [replace(work, axes=axes_of("strategies", one)) for one in self.strategies]

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
        known = (one for one in self.measured if axes_of("measured", one.strategy) == own)
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


def on_virtual_ranks(
    entries: Sequence[Entry], count: int, costs: ComputeCosts
) -> tuple[Entry, ...]:
    """Return entries, some of them with the times of virtual ranks.

    Parameters
    ----------
    entries : sequence of Entry
    count : int
        Of those with ranks that `predict` can execute: the first, the last and others between them.
    costs : ComputeCosts
        On any platform.
    """
    found = [*entries]
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
        found[i] = replace(entries[i], virtual=step.seconds / one.seconds)
    return tuple(found)


def draw_paper(file: Path, output: Path | None, csv: Path | None) -> None:
    """Draw the figure that a file describes, and print its tables.

    Parameters
    ----------
    file : Path
    output : Path or None
        The picture; by default in this folder, with the name of the file.
    csv : Path or None
        A file for all predictions.
    """
    output = output or Path(f"{file.stem}.png")
    check_figure("oracle", output)
    paper = fields.read(Paper, fields.load("oracle", file), file.name)
    named, first = not paper.platform.endswith((".yaml", ".yml")), paper.works[0]
    platform = Platform.load(paper.platform if named else file.parent / paper.platform)
    costs = AnalyticCosts.of(first, platform)
    oracle = Oracle(Projector(replace(first, axes={}), platform, costs), paper.batch_per_rank)
    limits = paper.limits(oracle.projector.backend)
    head = table.title(first, platform.name, paper.batch_per_rank)
    if any(values for axis, values in vars(paper.axes).items() if axis != "ranks"):
        head += f", {first.ranks} ranks"
    print(paper.title, head, sep="\n")
    sweeps: list[Sweep] = []
    for axis, values in vars(paper.axes).items():
        if values:
            found = sweep(axis, oracle, paper.works, values)
            every = {n: on_virtual_ranks(e, paper.virtual, costs) for n, e in found.entries.items()}
            sweeps.append(found := replace(found, entries=every))
            what = table.QUANTITIES[0] if paper.draw == PARTS else paper.draw
            lines = table.of_sweep(found, what, paper.notes)
            print("", *lines, *error_of(found), sep="\n", flush=True)
    if paper.draw == PARTS:
        print("\nlimits:", *table.of_limits(limits.values()), sep="\n")
    table.write(csv, [row for one in sweeps for row in one.rows()])
    save_figure("oracle", output, partial(_draw, paper, head, sweeps, limits))
    print(f"\npicture: {output}")


# -- the picture: a panel with curves for each axis, or with bars for each strategy ---------------

COLORS = [PALETTE[3 * i % len(PALETTE)] for i in range(len(PALETTE))]
"""In an order in which neighbours differ."""

SMALL: Mapping[str, Any] = {"color": QUIET, "size": 8}

MISSING = {"color": QUIET, "hatch": "///", "edgecolor": "white", "label": "does not fit in memory"}


def error_of(found: Sweep, name: str | None = None) -> list[str]:
    """Return in words how far formulas are from virtual ranks; nothing without any.

    Parameters
    ----------
    found : Sweep
    name : str, optional
        Of a strategy; by default the mean of all.
    """
    known = (one for own in found.entries if name in (None, own) for one in found.entries[own])
    errors = [abs(1 / one.virtual - 1) for one in known if not isnan(one.virtual)]
    points = f"{len(errors)} point{'s' * (len(errors) > 1)}"
    return [f"mean error {100 * np.mean(errors):.1f} % at {points}"] if errors else []


def _draw(
    paper: Paper, line: str, sweeps: Sequence[Sweep], limits: Mapping[str, table.Limit], make: Any
) -> Any:
    """Return the figure: the panels, and the legend in a place of its own.

    Parameters
    ----------
    paper : Paper
    line : str
        Below the title.
    sweeps : sequence of Sweep
    limits : mapping of str to Limit
        By the label of a strategy.
    make : type
        `matplotlib.figure.Figure`.
    """
    bars = paper.draw not in table.QUANTITIES
    panels = [(one, name) for one in sweeps for name in (one.entries if bars else (None,))]
    rows = max(round((len(panels) / 1.7) ** 0.5), 1)
    columns = -(-(len(panels) + 1) // rows)
    figure = make(figsize=(1 + 3 * columns, 1 + 2.9 * rows), layout="constrained")
    every = [*figure.subplots(rows, columns, squeeze=False).flat]
    handles: dict[str, Any] = {}
    for axes, (found, name) in zip(every, panels, strict=False):
        what = SWEEPS[found.axis]
        axes.set_xlabel(f"{what.label} ({what.unit})" if what.unit else what.label, **SMALL)
        axes.grid(color=LINE, lw=0.8, axis="y" if bars else "both")
        axes.tick_params(length=0, which="both", labelcolor=QUIET, labelsize=8)
        axes.spines[:].set_visible(False)
        title = _curves(axes, found, paper) if name is None else _bars(axes, found, name, limits)
        axes.set_title("\n".join([title, *error_of(found, name)]), color=INK, size=9)
        drawn, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, drawn, strict=True))
    for axes in every[len(panels) :]:
        axes.axis("off")
    every[len(panels)].legend(handles.values(), handles, loc="center", fontsize=9)
    figure.suptitle(f"{paper.title}\n{line}", color=INK, size=10)
    return figure


def _curves(axes: Any, found: Sweep, paper: Paper) -> str:
    """Draw the curves of all strategies; return the title of the panel."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    what, x = paper.draw, [value / SWEEPS[found.axis].scale for value in found.values]
    every, markers = list[float](), dict[str, str]()
    for i, entries in enumerate(found.entries.values()):
        color = COLORS[i % len(COLORS)]
        curve = [table.value_of(one, what) for one in entries]
        axes.loglog(x, curve, color=color, label=label(paper.works[i]))
        times = [table.value_of(one, what, one.virtual) for one in entries]
        full = [nan if one.possible else own for one, own in zip(entries, curve, strict=True)]
        known = [paper.measured_with(one.work) for one in entries]
        points = {"virtual ranks": ("o", times), MISSING["label"]: ("x", full)}
        for words, (marker, values) in (points | {"measured": ("*", known)}).items():
            if not np.isnan(values).all():
                axes.plot(x, values, marker, color=INK if values is known else color)
                markers[words] = marker
        every += [*curve, *times, *known]
    for words, marker in markers.items():
        axes.plot([], [], marker, color=INK, label=words)
    finite = [value for value in every if isfinite(value)]
    low, high = min(finite, default=1.0), max(finite, default=1.0)
    if what == table.QUANTITIES[1]:
        xscale = "linear" if found.axis == "ranks" else "log"
        axes.set(xscale=xscale, yscale="linear", ylim=(0, 1.1 * high))
    else:
        axes.set_ylim(low / 1.2, 1.2 * high)
        steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 200 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.set_xticks(x)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:.6g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_ylabel(what if what == table.QUANTITIES[1] else f"{what} (s)", **SMALL)
    return SWEEPS[found.axis].label


def _bars(axes: Any, found: Sweep, name: str, limits: Mapping[str, table.Limit]) -> str:
    """Draw the parts of the step of a strategy; return the title of the panel."""
    middle: dict[str, Any] = {"ha": "center", "va": "center", **SMALL}
    point: dict[str, Any] = {"color": INK, "mec": "white", "label": "virtual ranks"}
    entries = found.entries[name]
    texts = iter(table.durations([one.projection.epoch for one in entries if one.projection]))
    for place, entry in enumerate(entries):
        one, base = entry.projection, 0.0
        if one is None:
            axes.text(place, 50, "not possible", rotation=90, **middle)
            continue
        for (part, seconds), color in zip(one.step.parts(one.loader).items(), COLORS, strict=False):
            share = 100 * seconds / one.seconds
            more = {} if entry.possible else {**MISSING, "color": color, "label": ""}
            axes.bar(place, share, 0.8, **{"bottom": base, "color": color, "label": part, **more})
            base += share
        axes.text(place, 116, next(texts), **middle)
        if not isnan(entry.virtual):
            axes.plot(place, 100 * entry.virtual, "o", **point)
    axes.bar(0, 0, **MISSING)
    axes.set_xticks(range(len(found.texts)), found.texts)
    axes.set(xlim=(-0.6, len(found.values) - 0.4), ylim=(0, 122), yticks=range(0, 101, 25))
    axes.set_ylabel("share of a step (%); above: time of an epoch", **SMALL)
    limit = limits.get(name)
    if limit is None or found.axis != "ranks":
        return name
    place = bisect_right(found.values, limit.ranks)
    if place < len(found.values):
        axes.axvline(place - 0.5, color=INK, ls="--", lw=1, label="limit")
    return f"{name}: up to {limit.ranks} ranks\n{limit.reason.partition(';')[0]}"

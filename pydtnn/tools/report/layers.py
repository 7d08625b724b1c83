"""Layers: their time, and what they achieve of the machine's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.tools.report.runs import TRACE, RunTrace, RunView
from pydtnn.tools.report.section import (
    AXIS_OF_ROWS,
    COLOURS,
    Figure,
    Section,
    Table,
    line,
    section,
    stacked_bars,
)
from pydtnn.tools.tracing.analysis import Machine, Rate, machine, rates
from pydtnn.utils.observer import Kind

KINDS = {Kind.FORWARD: ("forward", "circle"), Kind.BACKWARD: ("backward", "diamond")}

MACHINE = "limit of the machine"

MAX_LAYERS = 16
"""Maximum number of layers that are shown by name."""


@section(
    "layers",
    "Layers",
    TRACE,
    "Each point is a layer in one direction; its area grows with the time per step. The line is "
    "what the machine allows (roofline): measured bandwidth of copies times operations per byte, "
    "at most the measured rate of matrix products, for the threads of a rank; the better of two "
    "measurements, before and after training. Rates count the arithmetic of the definition of a "
    "layer, so fast algorithms may exceed it.",
)
def layers(result: Section, traced: Sequence[tuple[RunView, RunTrace]]) -> None:
    """Fill the section with layers under the roofline, and a table of those that take longest."""
    known = [
        (run, own, machine(trace.timeline))
        for run, trace in traced
        if (own := rates(trace.timeline, trace.labels))
    ]
    if not known:
        result.absent = "the traces do not contain the operations of the layers; record them again"
        return
    points = [rate for _, own, _ in known for rate in own if rate.flops and rate.nbytes]
    axes = _axes(points, [limits for *_, limits in known if limits])
    longest = 1.05e3 * max(max(_totals(own).values()) for _, own, _ in known)
    result.figures = [
        *(_roofline(run, own, limits, axes) for run, own, limits in known),
        *(_durations(run, own, longest) for run, own, _ in known),
    ]
    result.tables = [_table(run, own, limits) for run, own, limits in known]
    result.legend = {
        **{name: COLOURS[name] for name, _ in KINDS.values()},
        MACHINE: f"{COLOURS['other']} line",
    }


def _axes(
    points: Sequence[Rate], machines: Sequence[Machine]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the axes of the rooflines, equal for all runs."""
    x = [rate.intensity for rate in points]
    x += [one.flops_per_second / one.bytes_per_second for one in machines]
    y = [rate.flops_per_second / 1e9 for rate in points if rate.seconds]
    y += [one.flops_per_second / 1e9 for one in machines]
    return _scale("operations per byte (flop/B)", x), _scale("Gflop/s", y)


def _scale(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with labels at 1, 2, 5, 10, ..., or at powers of ten only."""
    low, high = min(values, default=1), max(values, default=1)
    ends = {"range": [math.log10(low / 2), math.log10(high * 2)]}
    narrow = high < 50 * low
    ticks = {"dtick": "D2", "exponentformat": "none"} if narrow else {"exponentformat": "power"}
    return {"title": title, "type": "log", **({"dtick": 1} | ticks), **ends}


def _roofline(
    run: RunView,
    found: Sequence[Rate],
    limits: Machine | None,
    axes: tuple[dict[str, Any], dict[str, Any]],
) -> Figure:
    shown = [rate for rate in found if rate.flops and rate.nbytes]
    longest = max((rate.seconds for rate in shown), default=1.0)
    data: list[dict[str, Any]] = []
    caption = ""
    if limits and shown:
        corner = limits.flops_per_second / limits.bytes_per_second
        x = np.array([10 ** axes[0]["range"][0], corner, 10 ** axes[0]["range"][1]])
        y = np.minimum(x * limits.bytes_per_second, limits.flops_per_second) / 1e9
        template = "%{x:.3g} flop/B: at most %{y:.4g} Gflop/s"
        data.append(line(MACHINE, x, y, COLOURS["other"], template, width=2))
        above = sum(limits.limit(rate) > rate.seconds for rate in shown)
        if above:
            caption = (
                f"{above} of {len(shown)} points are above the line: their algorithm needs fewer "
                "operations, their operands stay in caches, or other programs ran while the limits "
                "were measured."
            )
    for kind, (name, symbol) in KINDS.items():
        own = [rate for rate in shown if rate.kind is kind]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [rate.intensity for rate in own],
                "y": [rate.flops_per_second / 1e9 for rate in own],
                "text": [f"{rate.name} ({rate.type}), {1e3 * rate.seconds:.3g} ms" for rate in own],
                "marker": {
                    "color": COLOURS[name],
                    "symbol": symbol,
                    "size": [6 + 16 * (rate.seconds / longest) ** 0.5 for rate in own],
                    "opacity": 0.65,
                    "line": {"width": 0},
                },
                "hovertemplate": "%{text}<br>%{x:.3g} flop/B, %{y:.4g} Gflop/s<extra></extra>",
            }
        )
    return Figure(f"{run.label}: roofline", data, *axes, caption, height=420)


def _totals(found: Sequence[Rate]) -> dict[str, float]:
    """Return the seconds of each layer in both directions, the longest first."""
    totals: dict[str, float] = {}
    for rate in found:
        totals[rate.name] = totals.get(rate.name, 0.0) + rate.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _durations(run: RunView, found: Sequence[Rate], longest: float) -> Figure:
    """Return the time of the layers that take longest, in both directions."""
    totals = _totals(found)
    shown = [*totals][:MAX_LAYERS]
    seconds = {(rate.name, rate.kind): 1e3 * rate.seconds for rate in found}
    rest = sum(totals.values()) - sum(totals[name] for name in shown)
    others = len(totals) - len(shown)
    parts = {
        name: [seconds.get((layer, kind), 0.0) for layer in shown]
        for kind, (name, _) in KINDS.items()
    }
    figure = stacked_bars(
        f"{run.label}: layers that take longest",
        shown,
        parts,
        {"title": "time per step (ms)", "range": [0, longest]},
        caption=f"The other {others} layers take {1e3 * rest:.3g} ms." if others else "",
        gap=0.25,
        height=420,
    )
    figure.y = {**AXIS_OF_ROWS, "tickfont": {"size": 11}}
    return figure


def _table(run: RunView, found: Sequence[Rate], limits: Machine | None) -> Table:
    longest = sorted(found, key=lambda rate: -rate.seconds)[:MAX_LAYERS]
    records = [
        {
            "layer": rate.name,
            "type": rate.type,
            "direction": rate.kind.name.lower(),
            "per step": f"{1e3 * rate.seconds:.3f} ms",
            "Gflop/s": f"{rate.flops_per_second / 1e9:.1f}",
            "GB/s": f"{rate.bytes_per_second / 1e9:.2f}",
            "of the roofline": f"{100 * limits.limit(rate) / rate.seconds:.0f} %" if limits else "",
        }
        for rate in longest
    ]
    title = f"Layers of {run.label} that take longest"
    return Table.of(title, records, folded=True, numbers=True)

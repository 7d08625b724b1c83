"""Layers: their time, and what they achieve of the machine's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.report.runs import Run, Traced, chosen, why_untraced
from pydtnn.report.section import COLOURS, Figure, Section, Table
from pydtnn.tracing.analysis import Machine, Rate, machine, rates
from pydtnn.utils.observer import Kind

POINTS = 600
"""Maximum number of points of a rank."""

ALL = 12_000
"""Maximum number of points of all ranks and runs."""

RANKS = 8
"""Maximum number of ranks in a figure."""


def memory(runs: Sequence[Run]) -> Section:
    """Return the bytes in use by each rank over a step of median duration."""
    section = Section("memory", "Memory over a step")
    traced = [(run, run.traced) for run in runs if run.traced]
    if not traced:
        section.absent = why_untraced(runs)
        return section
    curves = sum(min(RANKS, trace.timeline.size) for _, trace in traced)
    figures = [_figure(run, trace, min(POINTS, ALL // curves)) for run, trace in traced]
    section.figures = [figure for figure in figures if figure.data]
    most = max((max(curve["y"]) for figure in section.figures for curve in figure.data), default=0)
    for figure in section.figures:
        figure.y = {"title": "memory in use (MB)", "range": [0, 1.05 * most]}
    section.text = (
        "Memory in use in the backend's pool, in the step of median duration: parameters, state "
        "of the optimizer, and what layers keep from forward to backward. The line of the first "
        "rank is the strongest, that of the last the faintest."
    )
    section.absent = "the backend of the traces does not count its memory; --device cpu does"
    return section


def _figure(run: Run, trace: Traced, points: int) -> Figure:
    position = trace.typical()
    start, _ = trace.span(position)
    activities = trace.timeline.activities[trace.within(position)]
    activities = activities[(activities["memory"] >= 0) & (activities["lane"] == 0)]
    size = trace.timeline.size
    curves = {}
    for rank in np.unique(activities["rank"]).tolist():
        own = np.sort(activities[activities["rank"] == rank], order="stop")
        own = own[own["stop"] <= trace.timeline.steps.stop[position, rank]]
        if len(own):
            curves[rank] = (own["stop"] - start) / 1e6, own["memory"] / 1e6
    peaks = [curves[rank][1].max() if rank in curves else -1.0 for rank in range(size)]
    shown = [rank for rank in chosen(peaks, RANKS) if rank in curves]
    data = []
    for place, rank in enumerate(shown):
        x, y = peaks_of(*curves[rank], points)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"rank {rank}",
                "x": x,
                "y": y,
                "opacity": 1 - 0.7 * place / max(1, len(shown) - 1),
                "line": {"shape": "hv", "width": 1.6, "color": COLOURS["memory"]},
                "hovertemplate": f"rank {rank}, %{{x:.4g}} ms: %{{y:.4g}} MB<extra></extra>",
            }
        )
    time = {"title": "time in the step (ms)", "range": [0, trace.milliseconds(position)]}
    return Figure(run.label, data, time, "memory in use (MB)")


def peaks_of(x: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `count` points: of neighbours the one with the largest y.

    >>> peaks_of(np.arange(4), np.array([1, 5, 2, 3]), 2)
    (array([1, 3]), array([5, 3]))
    """
    if len(x) <= count:
        return x, y
    first = np.unique(np.arange(count) * len(x) // count)
    largest = [
        begin + int(np.argmax(y[begin:end]))
        for begin, end in zip(first, [*first[1:], len(x)], strict=True)
    ]
    return x[largest], y[largest]


KINDS = {Kind.FORWARD: ("forward", "circle"), Kind.BACKWARD: ("backward", "diamond")}

MACHINE = "limit of the machine"

LONGEST = 16
"""Maximum number of layers that are shown by name."""


def layers(runs: Sequence[Run]) -> Section:
    """Return the layers under the roofline, and a table of those that take longest."""
    section = Section("layers", "Layers")
    traced = [(run, run.traced) for run in runs if run.traced]
    if not traced:
        section.absent = why_untraced(runs)
        return section
    found = [
        (run, own, machine(trace.timeline))
        for run, trace in traced
        if (own := rates(trace.timeline, trace.labels))
    ]
    section.absent = "the traces do not contain the operations of the layers; record them again"
    if not found:
        return section
    points = [rate for _, own, _ in found for rate in own if rate.flops and rate.nbytes]
    axes = _axes(points, [limits for *_, limits in found if limits])
    longest = 1.05e3 * max(max(_totals(own).values()) for _, own, _ in found)
    section.figures = [
        *(_roofline(run, own, limits, axes) for run, own, limits in found),
        *(_durations(run, own, longest) for run, own, _ in found),
    ]
    section.tables = [_table(run, own, limits) for run, own, limits in found]
    section.legend = {
        **{name: COLOURS[name] for name, _ in KINDS.values()},
        MACHINE: f"{COLOURS['other']} line",
    }
    section.text = (
        "Each point is a layer in one direction; its area grows with the time per step. The line "
        "is what the machine allows (roofline): measured bandwidth of copies times operations per "
        "byte, at most the measured rate of matrix products, for the threads of a rank; the better "
        "of two measurements, before and after training. Rates count the arithmetic of the "
        "definition of a layer, so fast algorithms may exceed it."
    )
    return section


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
    run: Run,
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
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": MACHINE,
                "x": x,
                "y": np.minimum(x * limits.bytes_per_second, limits.flops_per_second) / 1e9,
                "line": {"color": COLOURS["other"], "width": 2},
                "hovertemplate": "%{x:.3g} flop/B: at most %{y:.4g} Gflop/s<extra></extra>",
            }
        )
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


def _durations(run: Run, found: Sequence[Rate], longest: float) -> Figure:
    """Return the time of the layers that take longest, in both directions."""
    totals = _totals(found)
    shown = [*totals][:LONGEST]
    seconds = {(rate.name, rate.kind): rate.seconds for rate in found}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [1e3 * seconds.get((layer, kind), 0.0) for layer in shown],
            "y": shown,
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} ms<extra></extra>",
        }
        for kind, (name, _) in KINDS.items()
    ]
    rest = sum(totals.values()) - sum(totals[name] for name in shown)
    others = len(totals) - len(shown)
    return Figure(
        f"{run.label}: layers that take longest",
        data,
        {"title": "time per step (ms)", "range": [0, longest]},
        {"autorange": "reversed", "ticks": "", "showgrid": False, "tickfont": {"size": 11}},
        f"The other {others} layers take {1e3 * rest:.3g} ms." if others else "",
        height=420,
        layout={"barmode": "stack", "bargap": 0.25},
    )


def _table(run: Run, found: Sequence[Rate], limits: Machine | None) -> Table:
    longest = sorted(found, key=lambda rate: -rate.seconds)[:LONGEST]
    rows = [
        [
            rate.name,
            rate.type,
            rate.kind.name.lower(),
            f"{1e3 * rate.seconds:.3f} ms",
            f"{rate.flops_per_second / 1e9:.1f}",
            f"{rate.bytes_per_second / 1e9:.2f}",
            f"{100 * limits.limit(rate) / rate.seconds:.0f} %" if limits else "",
        ]
        for rate in longest
    ]
    columns = ["layer", "type", "direction", "per step", "Gflop/s", "GB/s", "of the roofline"]
    title = f"Layers of {run.label} that take longest"
    return Table(title, columns, rows, folded=True, numbers=True, sortable=True)

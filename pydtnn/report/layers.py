"""Layers: their time, and what they achieve of the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.report.runs import Run, why_untraced
from pydtnn.report.section import GREY, Figure, Section, Table
from pydtnn.tracing.analysis import Machine, Rate, machine, rates
from pydtnn.utils.observer import Kind

KINDS = {
    Kind.FORWARD: ("forward", "#0072B2", "circle"),
    Kind.BACKWARD: ("backward", "#D55E00", "diamond"),
}

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
        (run, rates(trace.timeline, trace.labels), machine(trace.timeline)) for run, trace in traced
    ]
    section.figures = [
        *(_roofline(run, own, limits) for run, own, limits in found if own),
        *(_durations(run, own) for run, own, _ in found if own),
    ]
    section.tables = [_table(run, own, limits) for run, own, limits in found if own]
    section.absent = "the traces do not contain the operations of the layers; record them again"
    section.text = (
        "Each point is a layer in one direction; its area grows with the time per step. The line "
        "is what the machine allows (roofline): measured bandwidth of copies times operations per "
        "byte, at most the measured rate of matrix products, for the threads of a rank. Rates "
        "count the arithmetic of the definition of a layer, so fast algorithms may exceed it."
    )
    return section


def _roofline(run: Run, found: Sequence[Rate], limits: Machine | None) -> Figure:
    shown = [rate for rate in found if rate.flops and rate.nbytes]
    longest = max((rate.seconds for rate in shown), default=1.0)
    data: list[dict[str, Any]] = []
    if limits and shown:
        corner = limits.flops_per_second / limits.bytes_per_second
        ends = [rate.intensity for rate in shown]
        x = np.array([min(*ends, corner) / 2, corner, max(*ends, corner) * 2])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "machine",
                "x": x,
                "y": np.minimum(x * limits.bytes_per_second, limits.flops_per_second) / 1e9,
                "line": {"color": GREY, "width": 2},
                "hovertemplate": "%{x:.3g} flop/B: at most %{y:.4g} Gflop/s<extra></extra>",
            }
        )
    for kind, (name, colour, symbol) in KINDS.items():
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
                    "color": colour,
                    "symbol": symbol,
                    "size": [6 + 16 * (rate.seconds / longest) ** 0.5 for rate in own],
                    "opacity": 0.65,
                    "line": {"color": "#ffffff", "width": 0.7},
                },
                "hovertemplate": "%{text}<br>%{x:.3g} flop/B, %{y:.4g} Gflop/s<extra></extra>",
            }
        )
    return Figure(
        f"{run.label}: roofline",
        data,
        _scale("operations per byte (flop/B)", [rate.intensity for rate in shown]),
        _scale("Gflop/s", [rate.flops_per_second for rate in shown]),
        height=420,
    )


def _scale(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with labels at 1, 2, 5, 10, ..., or at powers of ten only."""
    narrow = max(values, default=1) < 50 * min(values, default=1)
    ticks = {"dtick": "D2", "exponentformat": "none"} if narrow else {"exponentformat": "power"}
    return {"title": title, "type": "log", **({"dtick": 1} | ticks)}


def _durations(run: Run, found: Sequence[Rate]) -> Figure:
    """Return the time of the layers that take longest, in both directions."""
    totals: dict[str, float] = {}
    for rate in found:
        totals[rate.name] = totals.get(rate.name, 0.0) + rate.seconds
    shown = sorted(totals, key=lambda name: -totals[name])[:LONGEST]
    seconds = {(rate.name, rate.kind): rate.seconds for rate in found}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [1e3 * seconds.get((layer, kind), 0.0) for layer in shown],
            "y": shown,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} ms<extra></extra>",
        }
        for kind, (name, colour, _) in KINDS.items()
    ]
    rest = sum(totals.values()) - sum(totals[name] for name in shown)
    others = len(totals) - len(shown)
    return Figure(
        f"{run.label}: layers that take longest",
        data,
        {"title": "time per step (ms)", "rangemode": "tozero"},
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
    return Table(title, columns, rows, folded=True, numbers=True)

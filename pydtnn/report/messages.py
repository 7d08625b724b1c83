"""Who sends how much to whom, and who waits for whom, in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.report.runs import Run, why_untraced
from pydtnn.report.section import Figure, Section
from pydtnn.tracing.analysis import traffic, waits

SHOWN = 64
"""Maximum number of rows; of more ranks, neighbours are added up."""

LABELLED = 8
"""Maximum number of ranks whose numbers are written into the cells."""


def messages(runs: Sequence[Run]) -> Section:
    """Return the bytes from each rank to each other one, and the time of waiting, per step."""
    section = Section("messages", "Messages between ranks")
    traced = [(run, run.traced) for run in runs if run.traced and run.traced.timeline.size > 1]
    if not traced:
        section.absent = "the traces are those of one rank"
        if not any(run.traced for run in runs):
            section.absent = why_untraced(runs)
        return section
    figures = []
    for run, trace in traced:
        count = len(trace.steps)
        sent = traffic(trace.timeline)[0] / count
        waited = waits(trace.timeline, trace.blocks) / count
        if sent.any():
            scale, unit = (1e6, "MB") if sent.max() >= 1e6 else (1e3, "kB")
            words = f"{run.label}: bytes sent per step"
            figures.append(_figure(words, sent / scale, unit, "from rank", "to rank"))
        if waited.any():
            words = f"{run.label}: waiting per step"
            figures.append(_figure(words, 1e3 * waited, "ms", "waiting rank", "for rank"))
    section.figures = figures
    section.absent = "the traces contain neither messages nor waits between ranks"
    section.text = (
        "Messages inside of a collective operation of MPI or NCCL are not visible; with "
        "--allreduce ring, or another schedule of pydtnn, every message is recorded. A rank waits "
        "for another one until that has sent its message, or entered the collective operation."
    )
    return section


def blocks(values: np.ndarray) -> np.ndarray:
    """Return the sums over blocks of consecutive ranks, if there are more than `SHOWN` ranks."""
    every = -(-len(values) // SHOWN)
    first = range(0, len(values), every)
    return np.add.reduceat(np.add.reduceat(values, first, axis=0), first, axis=1)


def _figure(title: str, values: np.ndarray, unit: str, rows: str, columns: str) -> Figure:
    every, values = -(-len(values) // SHOWN), blocks(values)
    size = len(values)
    ticks = {"dtick": 1, "showgrid": False} if size <= 16 else {"showgrid": False}
    data = {
        "type": "heatmap",
        "x0": (every - 1) / 2,
        "y0": (every - 1) / 2,
        "dx": every,
        "dy": every,
        "z": np.where(values > 0, values, np.nan),
        "colorscale": [[0, "#e8f1fa"], [0.5, "#5a9fd4"], [1, "#08306b"]],
        "zauto": False,
        "zmin": 0,
        "zmax": float(values.max()),
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0, "len": 0.9},
        "hovertemplate": f"{rows} %{{y}}, {columns} %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
        "texttemplate": "%{z:.3g}" if size <= LABELLED else "",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
    }
    y = {
        "title": rows,
        "range": [size * every - 0.5, -0.5],
        "scaleanchor": "x",
        "constrain": "domain",
    }
    x = {"title": columns, "range": [-0.5, size * every - 0.5], "constrain": "domain"}
    caption = f"Cells are blocks of {every} x {every} ranks." if every > 1 else ""
    return Figure(title, [data], x | ticks, y | ticks, caption)

"""The memory in use over a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.report.phases import chosen
from pydtnn.report.runs import Run, why_untraced
from pydtnn.report.section import COLOURS, Figure, Section
from pydtnn.report.traced import Traced

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

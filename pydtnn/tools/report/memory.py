"""Memory of each rank over a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.tools.report.runs import TRACE, RunTrace, RunView
from pydtnn.tools.report.section import COLOURS, Figure, Section, line, section, spread_places

MAX_POINTS_OF_RANK = 600

MAX_POINTS = 12_000
"""Maximum number of points of all ranks and runs."""

MAX_RANKS = 8
"""Maximum number of ranks in a figure."""


@section(
    "memory",
    "Memory over a step",
    TRACE,
    "Memory in use in the backend's pool, in the step of median duration: parameters, state of the "
    "optimizer, and what layers keep from forward to backward. The line of the first rank is the "
    "strongest, that of the last the faintest.",
)
def memory(result: Section, traced: Sequence[tuple[RunView, RunTrace]]) -> None:
    """Fill the section with the bytes in use by each rank over a step of median duration."""
    curves = sum(min(MAX_RANKS, trace.timeline.size) for _, trace in traced)
    points = min(MAX_POINTS_OF_RANK, MAX_POINTS // curves)
    figures = [_figure(run, trace, points) for run, trace in traced]
    result.figures = [figure for figure in figures if figure.data]
    most = max((max(curve["y"]) for figure in result.figures for curve in figure.data), default=0)
    for figure in result.figures:
        figure.y = {"title": "memory in use (MB)", "range": [0, 1.05 * most]}
    result.absent = "the backend of the traces does not count its memory; --device cpu does"


def _figure(run: RunView, trace: RunTrace, points: int) -> Figure:
    position = trace.typical()
    start, _ = trace.span(position)
    activities = trace.timeline.activities[trace.within(position)]
    activities = activities[(activities["memory"] >= 0) & (activities["lane"] == 0)]
    activities = np.sort(activities, order="stop")
    curves = {}
    for rank, stop in enumerate(trace.timeline.steps.stop[position]):
        own = activities[(activities["rank"] == rank) & (activities["stop"] <= stop)]
        if len(own):
            curves[rank] = (own["stop"] - start) / 1e6, own["memory"] / 1e6
    peaks = [
        curves[rank][1].max() if rank in curves else -1.0 for rank in range(trace.timeline.size)
    ]
    shown = [rank for rank in spread_places(peaks, MAX_RANKS) if rank in curves]
    data = []
    for place, rank in enumerate(shown):
        name, (x, y) = f"rank {rank}", peaks_of(*curves[rank], points)
        template = f"{name}, %{{x:.4g}} ms: %{{y:.4g}} MB"
        curve = line(name, x, y, COLOURS["memory"], template, width=1.6, shape="hv")
        data.append(curve | {"opacity": 1 - 0.7 * place / max(1, len(shown) - 1)})
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

"""What every rank did in a step, as bars over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pydtnn.tools.report.runs import TRACE, RunTrace, RunView
from pydtnn.tools.report.section import COLOURS, Figure, Section, section, spread_places
from pydtnn.utils.observer import Kind

GROUPS = (
    *("forward", "backward", "loss", "update", "communication", "waiting for a rank"),
    *("message in flight", "data", "callbacks", "other"),
)
"""Groups of activities, in this order; see `pydtnn.tools.report.section.COLOURS`."""

PHASES = {
    "forward": "forward",
    "backward": "backward",
    "loss": "loss",
    "update": "update",
    "exchange": "communication",
    "data": "data",
    "checkpoint": "callbacks",
    "checkpoint end": "callbacks",
}
"""Group of phases besides callbacks; those that enclose others have no bar."""

ENCLOSING = ("start", "epoch", "step", "evaluation")

KINDS = {
    Kind.FORWARD: ("layers", "forward"),
    Kind.BACKWARD: ("layers", "backward"),
    Kind.KERNEL: ("kernels", "other"),
    Kind.CALL: ("calls", "communication"),
    Kind.WAIT: ("calls", "waiting for a rank"),
    Kind.LOAD: ("loading", "data"),
}
"""Row and group of the kinds of activities besides phases."""

ROWS = ("phases", "layers", "kernels", "calls", "received")
"""Rows of the main thread; other threads have a row each, below them."""

MAX_RANKS = 8
"""Maximum number of ranks in a figure."""

MAX_BARS = 6000
"""Maximum number of bars on a page."""


class Bar(NamedTuple):
    """An activity: rank and row, group, start and duration in ms, and description."""

    row: tuple[int, str]
    group: str
    start: float
    duration: float
    text: str


@section(
    "timeline",
    "Timeline",
    TRACE,
    "Drag over a figure to zoom into a part of a step; double-click to return. A step begins where "
    "the preceding one ended, with callbacks and the wait for its batch. All times are on the "
    "clock of rank 0.",
)
def timeline(result: Section, traced: Sequence[tuple[RunView, RunTrace]]) -> None:
    """Fill the section with a step of median duration of each run; of one run also the slowest."""
    shown = [
        (f"{run.label}: {words}", trace, position)
        for run, trace in traced
        for position, words in _positions(trace, len(traced) == 1).items()
    ]
    result.figures = [_figure(*step, MAX_BARS // len(shown)) for step in shown]
    result.legend = {group: COLOURS[group] for group in GROUPS}


def group_of(phase: str) -> str:
    """Return the group of a phase."""
    return "callbacks" if phase.startswith("callback ") else PHASES.get(phase, "other")


def _positions(trace: RunTrace, slowest: bool) -> dict[int, str]:
    """Return the positions of the steps to show, with their description."""
    words = {trace.typical(): "median duration, "}
    if slowest:
        words.setdefault(trace.slowest(), "the slowest step, ")
    return {
        position: f"{text}step {trace.steps.numbers[position]} of epoch "
        f"{trace.steps.epochs[position]}, {trace.milliseconds(position):.1f} ms"
        for position, text in words.items()
    }


def _figure(title: str, trace: RunTrace, position: int, limit: int) -> Figure:
    steps = trace.timeline.steps
    ranks = spread_places((steps.stop[position] - steps.start[position]).tolist(), MAX_RANKS)
    bars = [bar for bar in _bars(trace, position) if bar.row[0] in ranks]
    caption = ""
    if len(bars) > limit:
        bars.sort(key=lambda bar: -bar.duration)
        caption = f"Activities below {1e3 * bars[limit].duration:.3g} µs are left out."
        bars = bars[:limit]
    order = {row: place for place, row in enumerate(ROWS)}
    rows = sorted(
        {bar.row for bar in bars}, key=lambda row: (row[0], order.get(row[1], len(ROWS)), row[1])
    )
    first = [place for place, row in enumerate(rows) if not place or row[0] != rows[place - 1][0]]
    labels = [
        f"<b>rank {rank}</b>  {row}" if place in first else row
        for place, (rank, row) in enumerate(rows)
    ]
    data = [
        _trace(group, [bar for bar in bars if bar.group == group], rows)
        for group in GROUPS
        if any(bar.group == group for bar in bars)
    ]
    dividers = [
        {
            **{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "layer": "below"},
            **{"y0": place - 0.5, "y1": place - 0.5, "line": {"color": "#999999", "width": 1}},
        }
        for place in first[1:]
    ]
    y = {
        "tickvals": [*range(len(rows))],
        "ticktext": labels,
        "range": [len(rows) - 0.5, -0.5],
        "fixedrange": True,
        "showgrid": False,
        "ticks": "",
        "tickfont": {"size": 11},
    }
    x = {"title": "time in the step (ms)", "range": [0, trace.milliseconds(position)]}
    return Figure(
        title,
        data,
        x,
        y,
        caption,
        height=70 + 21 * max(4, len(rows)),
        wide=True,
        layout={"barmode": "overlay", "shapes": dividers},
    )


def _trace(group: str, bars: Sequence[Bar], rows: Sequence[tuple[int, str]]) -> dict[str, Any]:
    bars = sorted(bars, key=lambda bar: (bar.row, bar.start))
    return {
        "type": "bar",
        "orientation": "h",
        "name": group,
        "base": [bar.start for bar in bars],
        "x": [bar.duration for bar in bars],
        "y": [rows.index(bar.row) for bar in bars],
        "text": [bar.text for bar in bars],
        "textposition": "none",
        "width": 0.84,
        "marker": {
            "color": COLOURS[group],
            "line": {"width": 0},
            # Neighbouring layers have different shades.
            "opacity": [
                0.65 if i % 2 and bar.row[1] == "layers" else 1 for i, bar in enumerate(bars)
            ],
        },
        "hovertemplate": "%{text}<br>%{x:.4g} ms from %{base:.4g} ms<extra></extra>",
    }


def _bars(trace: RunTrace, position: int) -> Iterator[Bar]:
    """Return the bars of all ranks, cut at the ends of the step."""
    begin, end = trace.span(position)
    timeline = trace.timeline
    for activity in timeline.activities[trace.within(position)]:
        kind, name = Kind(int(activity["kind"])), timeline.names[activity["name"]]
        if kind is Kind.PHASE and name in ENCLOSING:
            continue
        row, group = ("phases", group_of(name)) if kind is Kind.PHASE else KINDS[kind]
        if activity["lane"]:
            row = timeline.lanes[activity["rank"]][activity["lane"]]
        words = name if kind in (Kind.PHASE, Kind.CALL) else f"{kind.name.lower()} {name}"
        if activity["bucket"] >= 0:
            words += f", bucket {activity['bucket']}"
        yield _cut(activity["rank"], row, group, activity, begin, end, words)
    received = timeline.messages.received
    inside = (received["start"] < end) & (received["stop"] > begin)
    for message in received[np.flatnonzero(inside)]:
        words = f"message from rank {message['source']}"
        yield _cut(message["target"], "received", "message in flight", message, begin, end, words)


def _cut(rank: int, row: str, group: str, record: np.void, begin: int, end: int, words: str) -> Bar:
    """Return the bar of the part of an activity or message that lies within a step."""
    start, stop = max(int(record["start"]), begin), min(int(record["stop"]), end)
    if record["nbytes"] > 0:
        words += f", {record['nbytes'] / 1e3:.4g} kB"
    return Bar((int(rank), row), group, (start - begin) / 1e6, (stop - start) / 1e6, words)

"""Who sends how much to whom, and who waits for whom, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.report.runs import Run, Traced, why_untraced
from pydtnn.report.section import COLOURS, Figure, Section
from pydtnn.tracing.analysis import traffic, waits

SHOWN = 64
"""Maximum number of rows; of more ranks, neighbours are added up."""

PREFIXES = {"M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6}
"""Prefixes of units."""

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
    for words, unit, rows, columns, meaning, of in (
        ("bytes sent per step", "B", "from rank", "to rank", "communication", _sent),
        ("waiting per step", "s", "waiting rank", "for rank", "waiting for a rank", _waited),
    ):
        values = [(run, of(trace) / len(trace.steps)) for run, trace in traced]
        most = max(float(blocks(one).max()) for _, one in values)
        prefix = next(p for p, scale in PREFIXES.items() if most >= scale or p == "µ")
        figures += [
            _figure(
                f"{run.label}: {words}",
                one / PREFIXES[prefix],
                most / PREFIXES[prefix],
                f"{prefix}{unit}",
                (rows, columns),
                COLOURS[meaning],
            )
            for run, one in values
            if one.any()
        ]
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


def _sent(trace: Traced) -> np.ndarray:
    return traffic(trace.timeline)[0]


def _waited(trace: Traced) -> np.ndarray:
    return waits(trace.timeline, trace.blocks)


def _figure(
    title: str, values: np.ndarray, most: float, unit: str, names: tuple[str, str], colour: str
) -> Figure:
    """Return a matrix as bars of length 1, whose opacity is the share of the largest number."""
    every, values = -(-len(values) // SHOWN), blocks(values)
    size = len(values)
    rows, columns = names
    places = np.argwhere(values > 0)
    numbers = values[values > 0]
    data: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "base": every * places[:, 1] - 0.48 * every + (every - 1) / 2,
        "x": np.full(len(places), 0.96 * every),
        "y": every * places[:, 0] + (every - 1) / 2,
        "width": 0.96 * every,
        "text": [f"{number:.3g}" for number in numbers],
        "textposition": "inside" if size <= LABELLED else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "hovertext": [
            f"{rows} {row * every}, {columns} {column * every}: {number:.4g} {unit}"
            for (row, column), number in zip(places.tolist(), numbers, strict=True)
        ],
        "hoverinfo": "text",
        "marker": {"color": colour, "opacity": 0.15 + 0.85 * numbers / most, "line": {"width": 0}},
    }
    ends = {"showgrid": False, "constrain": "domain"} | ({"dtick": 1} if size <= 16 else {})
    x = {"title": columns, "range": [-0.5, size * every - 0.5]}
    y = {"title": rows, "range": [size * every - 0.5, -0.5], "scaleanchor": "x"}
    caption = f"In {unit}; the strongest colour is {most:.3g} {unit}."
    if every > 1:
        caption += f" Cells are blocks of {every} x {every} ranks."
    return Figure(title, [data], x | ends, y | ends, caption)

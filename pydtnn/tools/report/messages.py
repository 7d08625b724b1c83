"""Who sends how much to whom, and who waits for whom, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.tools.report.runs import MESSAGES, RunTrace, RunView
from pydtnn.tools.report.section import COLOURS, Figure, Section, every, section
from pydtnn.tools.tracing.analysis import traffic, waits

MAX_ROWS = 64
"""Maximum number of rows; of more ranks, neighbours are added up."""

PREFIXES = {"M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6}
"""Prefixes of units."""

MAX_LABELLED = 8
"""Maximum number of ranks whose numbers are written into the cells."""


@section(
    "messages",
    "Messages between ranks",
    MESSAGES,
    "Messages inside of a collective operation of MPI or NCCL are not visible; with --allreduce "
    "ring, or another schedule of pydtnn, every message is recorded. A rank waits for another one "
    "until that has sent its message, or entered the collective operation.",
)
def messages(result: Section, traced: Sequence[tuple[RunView, RunTrace]]) -> None:
    """Fill the section with bytes from rank to rank, and the time of waiting, per step."""
    sent = [(run, traffic(trace.timeline)[0] / len(trace.steps)) for run, trace in traced]
    waited = [
        (run, waits(trace.timeline, trace.blocks) / len(trace.steps)) for run, trace in traced
    ]
    for title, unit, names, meaning, values in (
        ("bytes sent per step", "B", ("from rank", "to rank"), "communication", sent),
        ("waiting per step", "s", ("waiting rank", "for rank"), "waiting for a rank", waited),
    ):
        most = max(float(blocks(matrix).max()) for _, matrix in values)
        prefix = next(p for p, scale in PREFIXES.items() if most >= scale or p == "µ")
        scale, unit = PREFIXES[prefix], f"{prefix}{unit}"
        result.figures = [
            *result.figures,
            *(
                _figure(f"{run.label}: {title}", matrix / scale, most / scale, unit, names, meaning)
                for run, matrix in values
                if matrix.any()
            ),
        ]
    result.absent = "the traces contain neither messages nor waits between ranks"


def blocks(values: np.ndarray) -> np.ndarray:
    """Return the sums over blocks of consecutive ranks, if there are more than `MAX_ROWS` ranks."""
    first = range(0, len(values), every(len(values), MAX_ROWS))
    return np.add.reduceat(np.add.reduceat(values, first, axis=0), first, axis=1)


def _figure(
    title: str, values: np.ndarray, most: float, unit: str, names: tuple[str, str], meaning: str
) -> Figure:
    """Return a matrix as bars of length 1, whose opacity is the share of the largest number."""
    block, values = every(len(values), MAX_ROWS), blocks(values)
    size = len(values)
    rows, columns = names
    places = np.argwhere(values > 0)
    numbers = values[values > 0]
    data: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "base": block * places[:, 1] - 0.48 * block + (block - 1) / 2,
        "x": np.full(len(places), 0.96 * block),
        "y": block * places[:, 0] + (block - 1) / 2,
        "width": 0.96 * block,
        "text": [f"{number:.3g}" for number in numbers],
        "textposition": "inside" if size <= MAX_LABELLED else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "hovertext": [
            f"{rows} {row * block}, {columns} {column * block}: {number:.4g} {unit}"
            for (row, column), number in zip(places.tolist(), numbers, strict=True)
        ],
        "hoverinfo": "text",
        "marker": {
            "color": COLOURS[meaning],
            "opacity": 0.15 + 0.85 * numbers / most,
            "line": {"width": 0},
        },
    }
    ends = {"showgrid": False, "constrain": "domain"} | ({"dtick": 1} if size <= 16 else {})
    x = {"title": columns, "range": [-0.5, size * block - 0.5]}
    y = {"title": rows, "range": [size * block - 0.5, -0.5], "scaleanchor": "x"}
    caption = f"In {unit}; the strongest colour is {most:.3g} {unit}."
    if block > 1:
        caption += f" Cells are blocks of {block} x {block} ranks."
    return Figure(title, [data], x | ends, y | ends, caption)

"""Curves over the epochs: loss, metrics, learning rate and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.report.runs import MEASUREMENTS, Run
from pydtnn.report.section import Figure, Section, every, line, section
from pydtnn.runs.run import VALIDATION

MAX_POINTS_OF_CURVE = 800

MAX_POINTS = 6000
"""Maximum number of points of the curves of a figure."""

MAX_MARKED_EPOCHS = 40
"""Maximum number of epochs whose points have markers."""


def _inside(run: Run, name: str, count: int) -> dict[str, Any]:
    """Return a line through the intervals of one of a number of runs."""
    points = min(MAX_POINTS_OF_CURVE, MAX_POINTS // count)
    merged = max(1, points // len(run.intervals))
    shown = run.intervals[:: every(len(run.intervals), points)]
    intervals = [epoch.merged(merged) for epoch in shown]
    x = np.concatenate([epoch.position() for epoch in intervals])
    y = np.concatenate([getattr(epoch, name) for epoch in intervals])
    label = run.title if count > 1 else "training"
    return line(label, x, y, run.colour, "epoch %{x:.2f}: %{y:.4g}", extra=_plain(run.label))


def training(runs: Sequence[Run]) -> Section:
    """Return the curves of loss, metrics and learning rate."""
    names = dict.fromkeys(name for run in runs for logs in run.history for name in logs)
    values = [name for name in names if name != "lr" and not name.startswith(VALIDATION)]
    figures = [_value(runs, name) for name in values]
    if "lr" in names:
        figures.append(_curve(runs, "lr", "Learning rate", "learning rate"))
    text = (
        "Solid lines are means over the steps of training, dashed lines results on the validation "
        "set at the end of each epoch."
    )
    return Section("training", "Training", text, figures, legend=legend_of(runs))


def legend_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the colours of runs; of one run those of training and validation."""
    if len(runs) > 1:
        return {run.title: f"{run.colour} line" for run in runs}
    validated = any(name.startswith(VALIDATION) for logs in runs[0].history for name in logs)
    colour = runs[0].colour
    return {"training": f"{colour} line", "validation": f"{colour} dash"} if validated else {}


@section("throughput", "Throughput", MEASUREMENTS)
def throughput(result: Section, measured: Sequence[tuple[Run, Any]]) -> None:
    """Fill the section with the samples per second over the epochs."""
    runs = [run for run, _ in measured]
    result.figures = [
        Figure(
            "Throughput over time",
            [_inside(run, "rate", len(runs)) for run in runs],
            _epochs(runs),
            {"title": "samples/s", "rangemode": "tozero"},
            "All ranks together, in training steps with the time spent waiting for data and in "
            "callbacks; evaluations are not included.",
            wide=True,
        )
    ]
    result.legend = legend_of(runs) if len(runs) > 1 else {}


def title_of(name: str) -> str:
    """Return the words of a logged value: "top5_accuracy" is "top5 accuracy"."""
    return name.removeprefix(VALIDATION).replace("_", " ")


def _value(runs: Sequence[Run], name: str) -> Figure:
    words = title_of(name)
    figure = _curve(runs, name, words[:1].upper() + words[1:], words)
    for run in runs:
        if any(VALIDATION + name in logs for logs in run.history):
            figure.data = [*figure.data, _ends(run, VALIDATION + name, len(runs))]
    return figure


def _curve(runs: Sequence[Run], name: str, title: str, unit: str) -> Figure:
    """Return the curves of a value of training, within epochs if it was measured there."""
    inside = name in ("loss", "lr")
    data = [(_inside if inside and run.intervals else _ends)(run, name, len(runs)) for run in runs]
    return Figure(title, data, _epochs(runs), unit)


def _epochs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the axis of the epochs."""
    return {"title": "epoch", "range": [0, 1.02 * max(len(run.history) for run in runs)]}


def _ends(run: Run, name: str, count: int) -> dict[str, Any]:
    """Return a line through the ends of the epochs of one of a number of runs."""
    step = every(len(run.history), min(MAX_POINTS_OF_CURVE, MAX_POINTS // count))
    epochs = [*range(len(run.history), 0, -step)][::-1]
    values = [run.history[epoch - 1].get(name) for epoch in epochs]
    label = "validation" if name.startswith(VALIDATION) else "training"
    look: dict[str, Any] = {"dash": "dash"} if label == "validation" else {}
    title, template = run.title if count > 1 else label, "epoch %{x}: %{y:.4g}"
    return {
        **line(title, epochs, values, run.colour, template, extra=_plain(run.label), **look),
        "mode": "lines+markers" if len(epochs) <= MAX_MARKED_EPOCHS else "lines",
        "marker": {"color": run.colour, "size": 7},
    }


def _plain(text: str) -> str:
    """Return text without the characters that have a meaning in a template of Plotly."""
    return text.replace("<", "&lt;").replace("%{", "% {")

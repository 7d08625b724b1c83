"""Curves over the epochs: loss, metrics, learning rate and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.tools.report.runs import MEASUREMENTS, RunView
from pydtnn.tools.report.section import COLOURS, Figure, Section, every, line, section
from pydtnn.tools.runs.run import VALIDATION
from pydtnn.utils.clock import VIRTUAL_SECONDS

MAX_POINTS_OF_CURVE = 800

MAX_POINTS = 6000
"""Maximum number of points of the curves of a figure."""

MAX_MARKED_EPOCHS = 40
"""Maximum number of epochs whose points have markers."""


def _inside(run: RunView, name: str, count: int) -> dict[str, Any]:
    """Return a line through the intervals of one of a number of runs."""
    points = min(MAX_POINTS_OF_CURVE, MAX_POINTS // count)
    merged = max(1, points // len(run.intervals))
    shown = run.intervals[:: every(len(run.intervals), points)]
    intervals = [epoch.merged(merged) for epoch in shown]
    x = np.concatenate([epoch.position() for epoch in intervals])
    y = np.concatenate([getattr(epoch, name) for epoch in intervals])
    label = run.title if count > 1 else "training"
    return line(label, x, y, run.colour, "epoch %{x:.2f}: %{y:.4g}", extra=_plain(run.label))


def training(runs: Sequence[RunView]) -> Section:
    """Return the curves of loss, metrics and learning rate."""
    names = dict.fromkeys(name for run in runs for logs in run.history for name in logs)
    others = ("lr", VIRTUAL_SECONDS)
    values = [name for name in names if name not in others and not name.startswith(VALIDATION)]
    figures = [_value(runs, name) for name in values]
    if virtual := [run for run in runs if any(VIRTUAL_SECONDS in logs for logs in run.history)]:
        figures += [_over_virtual_time(virtual, name, len(runs)) for name in values]
    if "lr" in names:
        figures.append(_curve(runs, "lr", "Learning rate", "learning rate"))
    text = (
        "Solid lines are means over the steps of training, dashed lines results on the validation "
        "set at the end of each epoch."
    )
    return Section("training", "Training", text, figures, legend=legend_of(runs))


def legend_of(runs: Sequence[RunView]) -> dict[str, str]:
    """Return the colours of runs, and the lines of training and validation."""
    names = {name for run in runs for logs in run.history for name in logs}
    colour = runs[0].colour if len(runs) == 1 else COLOURS["other"]
    kinds = {"training": f"{colour} line", "validation": f"{colour} dash"}
    several = {run.title: f"{run.colour} line" for run in runs} if len(runs) > 1 else {}
    return several | (kinds if any(name.startswith(VALIDATION) for name in names) else {})


@section("throughput", "Throughput", MEASUREMENTS)
def throughput(result: Section, measured: Sequence[tuple[RunView, Any]]) -> None:
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
    kinds = ("training", "validation")
    result.legend = {name: look for name, look in legend_of(runs).items() if name not in kinds}


def title_of(name: str) -> str:
    """Return the words of a logged value: "top5_accuracy" is "top5 accuracy"."""
    return name.removeprefix(VALIDATION).replace("_", " ")


def _value(runs: Sequence[RunView], name: str) -> Figure:
    words = title_of(name)
    figure = _curve(runs, name, words[:1].upper() + words[1:], words)
    for run in runs:
        if any(VALIDATION + name in logs for logs in run.history):
            figure.data = [*figure.data, _ends(run, VALIDATION + name, len(runs))]
    return figure


def _over_virtual_time(runs: Sequence[RunView], name: str, count: int) -> Figure:
    """Return the values at the ends of epochs over the time of virtual ranks."""
    words, time = title_of(name), {"title": "virtual time (s)", "rangemode": "tozero"}
    names = [
        (run, kind)
        for kind in (name, VALIDATION + name)
        for run in runs
        if any(kind in logs for logs in run.history)
    ]
    data = [_ends(run, kind, count, VIRTUAL_SECONDS) for run, kind in names]
    return Figure(f"{words[:1].upper() + words[1:]} over virtual time", data, time, words)


def _curve(runs: Sequence[RunView], name: str, title: str, unit: str) -> Figure:
    """Return the curves of a value of training, within epochs if it was measured there."""
    inside = name in ("loss", "lr")
    data = [(_inside if inside and run.intervals else _ends)(run, name, len(runs)) for run in runs]
    return Figure(title, data, _epochs(runs), unit)


def _epochs(runs: Sequence[RunView]) -> dict[str, Any]:
    """Return the axis of the epochs."""
    return {"title": "epoch", "range": [0, 1.02 * max(len(run.history) for run in runs)]}


def _ends(run: RunView, name: str, count: int, over: str = "") -> dict[str, Any]:
    """Return a line through the ends of the epochs of one of a number of runs.

    They are over the epochs, or `over` another value.
    """
    step = every(len(run.history), min(MAX_POINTS_OF_CURVE, MAX_POINTS // count))
    epochs = [*range(len(run.history), 0, -step)][::-1]
    values = [run.history[epoch - 1].get(name) for epoch in epochs]
    label = "validation" if name.startswith(VALIDATION) else "training"
    look: dict[str, Any] = {"dash": "dash"} if label == "validation" else {}
    title, template = run.title if count > 1 else label, "epoch %{x}: %{y:.4g}"
    places: list[Any] = list(epochs)
    if over:
        places = [run.history[epoch - 1].get(over) for epoch in epochs]
        template = "%{x:.4g} s: %{y:.4g}"
    return {
        **line(title, places, values, run.colour, template, extra=_plain(run.label), **look),
        "mode": "lines+markers" if len(epochs) <= MAX_MARKED_EPOCHS else "lines",
        "marker": {"color": run.colour, "size": 7},
    }


def _plain(text: str) -> str:
    """Return text without the characters that have a meaning in a template of Plotly."""
    return text.replace("<", "&lt;").replace("%{", "% {")

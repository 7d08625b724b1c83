"""Curves over the epochs: loss, metrics, learning rate and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.report.runs import Run
from pydtnn.report.section import Figure, Section, colour

POINTS = 800
"""Maximum number of points of a curve."""

ALL = 6000
"""Maximum number of points of the curves of a figure."""

VALIDATION = "val_"


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
        return {run.title: f"{colour(i)} line" for i, run in enumerate(runs)}
    validated = any(name.startswith(VALIDATION) for logs in runs[0].history for name in logs)
    legend = {"training": f"{colour(0)} line", "validation": f"{colour(0)} dash"}
    return legend if validated else {}


def throughput(runs: Sequence[Run]) -> Section:
    """Return the samples per second over the epochs."""
    section = Section("throughput", "Throughput")
    measured = [run for run in runs if run.intervals]
    if not measured:
        section.absent = (
            "no run has the file measurements.jsonl, which python -m pydtnn.train and the "
            "callback MeasurementWriter write"
        )
        return section
    section.figures = [
        Figure(
            "Throughput over time",
            [_line(run, runs, "rate") for run in measured],
            _epochs(measured),
            {"title": "samples/s", "rangemode": "tozero"},
            "All ranks together, in training steps with the time spent waiting for data and in "
            "callbacks; evaluations are not included.",
            wide=True,
        )
    ]
    section.legend = legend_of(runs) if len(runs) > 1 else {}
    return section


def title_of(name: str) -> str:
    """Return the words of a logged value: "top5_accuracy" is "top5 accuracy"."""
    return name.removeprefix(VALIDATION).replace("_", " ")


def _value(runs: Sequence[Run], name: str) -> Figure:
    words = title_of(name)
    figure = _curve(runs, name, words[:1].upper() + words[1:], words)
    for run in runs:
        if any(VALIDATION + name in logs for logs in run.history):
            ends = _ends(run, VALIDATION + name, runs)
            ends["line"]["dash"] = "dash"
            ends["name"] = run.title if len(runs) > 1 else "validation"
            figure.data = [*figure.data, ends]
    return figure


def _curve(runs: Sequence[Run], name: str, title: str, unit: str) -> Figure:
    """Return the curves of a value of training, within epochs if it was measured there."""
    data = []
    for run in runs:
        measured = name in ("loss", "lr") and run.intervals
        data.append(_line(run, runs, name) if measured else _ends(run, name, runs))
    return Figure(title, data, _epochs(runs), unit)


def _epochs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the axis of the epochs."""
    return {"title": "epoch", "range": [0, 1.02 * max(len(run.history) for run in runs)]}


def _line(run: Run, runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Return a line through the intervals of a run."""
    points = min(POINTS, ALL // len(runs))
    every = -(-len(run.intervals) // points)
    count = max(1, points // len(run.intervals))
    intervals = [epoch.merged(count) for epoch in run.intervals[::every]]
    of = {"rate": lambda epoch: epoch.samples / epoch.seconds}
    values = of.get(name, lambda epoch: getattr(epoch, name))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": run.title if len(runs) > 1 else "training",
        "x": np.concatenate([epoch.position() for epoch in intervals]),
        "y": np.concatenate([values(epoch) for epoch in intervals]),
        "line": {"color": colour(runs.index(run)), "width": 1.8},
        "hovertemplate": f"epoch %{{x:.2f}}: %{{y:.4g}}<extra>{_plain(run.label)}</extra>",
    }


def _ends(run: Run, name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a line through the ends of the epochs of a run."""
    every = -(-len(run.history) // min(POINTS, ALL // len(runs)))
    epochs = [*range(len(run.history), 0, -every)][::-1]
    own = colour(runs.index(run))
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(epochs) <= 40 else "lines",
        "name": run.title if len(runs) > 1 else "training",
        "x": epochs,
        "y": [run.history[epoch - 1].get(name) for epoch in epochs],
        "line": {"color": own, "width": 1.8},
        "marker": {"color": own, "size": 7},
        "hovertemplate": f"epoch %{{x}}: %{{y:.4g}}<extra>{_plain(run.label)}</extra>",
    }


def _plain(text: str) -> str:
    """Return text without the characters that have a meaning in a template of Plotly."""
    return text.replace("<", "&lt;").replace("%{", "% {")

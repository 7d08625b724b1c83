"""The page of a search: trials, their curves and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.tools.report.page import render_sections
from pydtnn.tools.report.section import COLOURS, Figure, Section, Table, line
from pydtnn.tools.search.dimension import Dimension
from pydtnn.tools.search.lines import (
    STATES,
    best_of,
    result_of,
    seconds_of,
    show_value,
)
from pydtnn.tools.search.space import Space
from pydtnn.tools.search.study import EPOCHS
from pydtnn.tools.search.training import command_of
from pydtnn.utils.units import duration

LOOK = {
    "complete": COLOURS["forward"],
    "pruned": COLOURS["data"],
    "failed": COLOURS["communication"],
    "running": COLOURS["other"],
}
"""Colour of each state."""

BEST = "#009E73"
"""Colour of the best trial."""

BELOW = -0.14
"""Where the line of a trial without an option passes its axis, which is from 0 to 1."""

MAX_CURVES = 400
"""Maximum number of curves of a figure, those of the last trials."""


def render(space: Space, study: Any) -> str:
    """Return the page as HTML that refers to no other file.

    Parameters
    ----------
    space : Space
    study : optuna.Study

    Raises
    ------
    ImportError
        If Jinja2 is not installed, with the command that installs it.
    """
    trials = study.get_trials(deepcopy=False)
    sections = [
        _results(space, trials),
        _history(space, trials),
        _options(space, trials),
        _curves(space, trials),
    ]
    goal = ", ".join(space.objective)
    return render_sections(f"Search: {len(trials)} trials, {goal}", sections)


def _state(one: Any) -> str:
    return STATES.get(one.state.name, "running")


def _value(space: Space, one: Any, place: int = 0) -> float | None:
    """Return a value of a trial; of one that was pruned the last that it reported."""
    if one.values is not None:
        return float(one.values[place])
    if one.intermediate_values and len(space.objective) == 1:
        return float(one.intermediate_values[max(one.intermediate_values)])
    return None


def _results(space: Space, trials: Sequence[Any]) -> Section:
    best = best_of(space, trials)
    counts = [f"{sum(_state(t) == state for t in trials)} {state}" for state in STATES.values()]
    text = ", ".join(counts) + ". "
    for one in best[:1]:
        text += f"Best: trial {one.number}, {result_of(space, one)}. "
        if "arguments" in one.user_attrs:
            text += f"Its command: {command_of(one)}"
    names = [dimension.name for dimension in space.dimensions]
    columns = ["trial", "state", *names, *space.objective, "epochs", "time"]
    rows = [
        [
            str(one.number),
            _state(one),
            *(show_value(one.params[name]) if name in one.params else "" for name in names),
            *(
                "" if (value := _value(space, one, place)) is None else f"{value:.4g}"
                for place in range(len(space.objective))
            ),
            str(one.user_attrs.get(EPOCHS, max(one.intermediate_values, default=""))),
            duration(seconds_of(one)),
        ]
        for one in trials
    ]
    chosen = {one.number for one in best}
    shown = [place for place, one in enumerate(trials) if one.number in chosen]
    table = Table("All trials", columns, rows, shown, folded=True, numbers=True, sortable=True)
    return Section("results", "Results", text, tables=[table])


def _points(space: Space, trials: Sequence[Any], x: Mapping[int, Any], place: int = 0) -> list[Any]:
    """Return points at the values of trials, one trace of Plotly for each state."""
    found = []
    for state, colour in LOOK.items():
        own = [t for t in trials if _state(t) == state and t.number in x]
        own = [t for t in own if _value(space, t, place) is not None]
        if own:
            values = [_value(space, t, place) for t in own]
            look, hover = {"color": colour, "size": 7}, "%{text}: %{x}, %{y:.4g}"
            drawn = _markers(state, [x[t.number] for t in own], values, look, hover)
            found.append({**drawn, "text": [f"trial {t.number}" for t in own]})
    return found


def _markers(
    name: str, x: Sequence[Any], y: Sequence[Any], look: Mapping[str, Any], hover: str
) -> dict[str, Any]:
    """Return a trace of Plotly with a marker at each point."""
    shown = {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": look}
    return {**shown, "hovertemplate": f"{hover}<extra></extra>"}


def _states(trials: Sequence[Any]) -> dict[str, str]:
    """Return the legend of the states that occur."""
    there = {_state(one) for one in trials}
    return {state: f"{colour} point" for state, colour in LOOK.items() if state in there}


def _history(space: Space, trials: Sequence[Any]) -> Section:
    figures, legend = [], _states(trials)
    numbers = {one.number: one.number for one in trials}
    for place, (name, direction) in enumerate(space.objective.items()):
        data = _points(space, trials, numbers, place)
        done = [one for one in trials if _state(one) == "complete"]
        if done:
            pick = np.maximum if direction == "maximize" else np.minimum
            best = pick.accumulate([one.values[place] for one in done])
            x = [one.number for one in done]
            data.append(
                {**line("best so far", x, best, BEST), "line": {"color": BEST, "shape": "hv"}}
            )
            legend["best so far"] = f"{BEST} line"
        figures.append(Figure(f"{name} of the trials", data, "trial", name, wide=True))
    if len(space.objective) > 1:
        first, second = [*space.objective][:2]
        values = {t.number: v for t in trials if (v := _value(space, t)) is not None}
        both = _points(space, trials, values, 1)
        figures.append(Figure(f"{second} and {first}", both, first, second, wide=True))
    return Section("history", "History", "", figures, legend=legend)


def _options(space: Space, trials: Sequence[Any]) -> Section:
    done = [one for one in trials if _value(space, one) is not None]
    figures = [_parallel(space, done, next(iter(space.objective)))] if done else []
    text = "Each line is a trial; the best tenth is highlighted."
    legend = {"best tenth": f"{BEST} line", "others": f"{COLOURS['other']} line"}
    absent = "no trial has a value"
    return Section("options", "Options", text, figures, legend=legend, absent=absent)


def _height(dimension: Dimension, value: Any) -> float:
    """Return the place of a value on the vertical axis of a dimension, from 0 to 1."""
    if dimension.choices:
        names = [show_value(one) for one in dimension.choices]
        return names.index(show_value(value)) / max(1, len(names) - 1)
    scale = np.log if dimension.log else float
    low, high = scale(dimension.low), scale(dimension.high)
    return float((scale(value) - low) / (high - low))


def _parallel(space: Space, trials: Sequence[Any], name: str) -> Figure:
    sign = -1 if space.objective[name] == "maximize" else 1
    ranked = sorted(trials, key=lambda one: sign * (_value(space, one) or 0.0))
    values = [_value(space, one) or 0.0 for one in ranked]
    low, high = min(values), max(values)
    best = max(1, len(ranked) // 10)
    data = []
    for place in range(min(len(ranked), MAX_CURVES) - 1, -1, -1):  # the best are drawn last
        one, value = ranked[place], values[place]
        y = [
            _height(d, one.params[d.name]) if d.name in one.params else BELOW
            for d in space.dimensions
        ]
        y.append((value - low) / (high - low) if high > low else 0.5)
        text = "<br>".join(f"{n} {show_value(v)}" for n, v in one.params.items())
        good = place < best
        drawn = line(
            "best tenth" if good else "others",
            [*range(len(y))],
            y,
            BEST if good else COLOURS["other"],
            f"trial {one.number}<br>{text}<br>{name} {value:.4g}",
            width=2.4 if good else 0.8,
        )
        data.append({**drawn, "opacity": 1.0 if good else 0.45})
    labels = [_label(dimension) for dimension in space.dimensions]
    labels.append(f"{name}<br>{low:.3g} to {high:.3g}")
    places = [*range(len(labels))]
    ticks = {"tickvals": places, "ticktext": labels, "title": "", "showgrid": False}
    look = {"type": "line", "layer": "below", "line": {"color": "#999999", "width": 1}}
    axes = [{**look, "x0": n, "x1": n, "y0": 0, "y1": 1} for n in places]
    caption = "Each vertical axis from the first value, below, to the last one."
    bounds = [-0.04, 1.04]
    if any(dimension.condition for dimension in space.dimensions):
        caption += " The line of a trial without an option passes below its axis."
        bounds[0] += BELOW
    return Figure(
        "Options and value of each trial",
        data,
        ticks,
        {"title": "", "showticklabels": False, "showgrid": False, "range": bounds},
        caption,
        height=420,
        wide=True,
        layout={"margin": {"l": 50, "r": 70, "t": 12, "b": 60}, "shapes": axes},
    )


def _label(dimension: Dimension) -> str:
    first, last = dimension.ends[0], dimension.ends[-1]
    return f"{dimension.name}<br>{show_value(first)} to {show_value(last)}"


def _curves(space: Space, trials: Sequence[Any]) -> Section:
    name, title = next(iter(space.objective)), "Learning curves"
    with_curve = [one for one in trials if one.intermediate_values][-MAX_CURVES:]
    if not with_curve:
        return Section("curves", title, absent="no trial has reported values of epochs")
    best = {one.number for one in best_of(space, trials)}
    data = []
    for one in sorted(with_curve, key=lambda one: one.number in best):
        epochs = sorted(one.intermediate_values)
        state = _state(one)
        colour, label = (BEST, "best") if one.number in best else (LOOK[state], state)
        values = [one.intermediate_values[epoch] for epoch in epochs]
        hover = f"trial {one.number}, epoch %{{x}}: %{{y:.4g}}"
        width = 2.6 if label == "best" else 1.0
        data.append(line(label, epochs, values, colour, hover, width=width))
        look = {"color": colour, "symbol": "x" if state == "pruned" else "circle"}
        data.append(_markers(label, epochs[-1:], values[-1:], look, hover))
    legend = {"best": f"{BEST} line"} if best else {}
    legend |= {state: f"{LOOK[state]} line" for state in _states(with_curve)}
    last = max(max(one.intermediate_values) for one in with_curve)
    axis = {"title": "epoch", "range": [0, 1.02 * last]}
    figure = Figure(f"{name} over the epochs", data, axis, name, height=420, wide=True)
    return Section("curves", title, "A cross is where a trial was pruned.", [figure], legend=legend)

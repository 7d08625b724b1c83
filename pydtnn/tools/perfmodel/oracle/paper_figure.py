"""The picture of a figure: a panel with curves for each axis, or with bars for each strategy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np

from pydtnn.tools.perfmodel.oracle.paper import Paper
from pydtnn.tools.perfmodel.oracle.table import QUANTITIES, Limit, durations, value_of
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, Sweep, label
from pydtnn.tools.schedules.figures import INK, LINE, PALETTE, QUIET

COLORS = [PALETTE[3 * i % len(PALETTE)] for i in range(len(PALETTE))]
"""In an order in which neighbours differ."""

SMALL: Mapping[str, Any] = {"color": QUIET, "size": 8}

MISSING = {"color": QUIET, "hatch": "///", "edgecolor": "white", "label": "does not fit in memory"}


def error_of(found: Sweep, name: str | None = None) -> list[str]:
    """Return in words how far formulas are from virtual ranks; nothing without any.

    Parameters
    ----------
    found : Sweep
    name : str, optional
        Of a strategy; by default the mean of all.
    """
    known = (own for one, own in found.virtual.items() if name in (None, one))
    errors = [abs(1 / ratio - 1) for own in known for ratio in own.values()]
    points = f"{len(errors)} point{'s' * (len(errors) > 1)}"
    return [f"mean error {100 * np.mean(errors):.1f} % at {points}"] if errors else []


def draw(
    paper: Paper, line: str, sweeps: Sequence[Sweep], limits: Mapping[str, Limit], make: Any
) -> Any:
    """Return the figure: the panels, and the legend in a place of its own.

    Parameters
    ----------
    paper : Paper
    line : str
        Below the title.
    sweeps : sequence of Sweep
    limits : mapping of str to Limit
        By the label of a strategy.
    make : type
        `matplotlib.figure.Figure`.
    """
    bars = paper.draw not in QUANTITIES
    panels = [(one, name) for one in sweeps for name in (one.entries if bars else (None,))]
    rows = max(round((len(panels) / 1.7) ** 0.5), 1)
    columns = -(-(len(panels) + 1) // rows)
    figure = make(figsize=(1 + 3 * columns, 1 + 2.9 * rows), layout="constrained")
    every = [*figure.subplots(rows, columns, squeeze=False).flat]
    handles: dict[str, Any] = {}
    for axes, (found, name) in zip(every, panels, strict=False):
        what = SWEEPS[found.axis]
        axes.set_xlabel(f"{what.label} ({what.unit})" if what.unit else what.label, **SMALL)
        axes.grid(color=LINE, lw=0.8, axis="y" if bars else "both")
        axes.tick_params(length=0, which="both", labelcolor=QUIET, labelsize=8)
        axes.spines[:].set_visible(False)
        title = _curves(axes, found, paper) if name is None else _bars(axes, found, name, limits)
        axes.set_title("\n".join([title, *error_of(found, name)]), color=INK, size=9)
        drawn, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, drawn, strict=True))
    for axes in every[len(panels) :]:
        axes.axis("off")
    every[len(panels)].legend(handles.values(), handles, loc="center", fontsize=9)
    figure.suptitle(f"{paper.title}\n{line}", color=INK, size=10)
    return figure


def _curves(axes: Any, found: Sweep, paper: Paper) -> str:
    """Draw the curves of all strategies; return the title of the panel."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    what, x = paper.draw, [value / SWEEPS[found.axis].scale for value in found.values]
    every, markers = list[float](), dict[str, str]()
    for i, (name, entries) in enumerate(found.entries.items()):
        color, ratios = COLORS[i % len(COLORS)], found.virtual.get(name, {})
        curve = [value_of(one, what) for one in entries]
        axes.loglog(x, curve, color=color, label=label(paper.works[i]))
        times = [value_of(one, what, ratios.get(k, nan)) for k, one in enumerate(entries)]
        full = [nan if one.possible else own for one, own in zip(entries, curve, strict=True)]
        known = [paper.measured_with(one.work) for one in entries]
        points = {"virtual ranks": ("o", times), MISSING["label"]: ("x", full)}
        for words, (marker, values) in (points | {"measured": ("*", known)}).items():
            if not np.isnan(values).all():
                axes.plot(x, values, marker, color=INK if values is known else color)
                markers[words] = marker
        every += [*curve, *times, *known]
    for words, marker in markers.items():
        axes.plot([], [], marker, color=INK, label=words)
    finite = [value for value in every if isfinite(value)]
    low, high = min(finite, default=1.0), max(finite, default=1.0)
    if what == QUANTITIES[1]:
        xscale = "linear" if found.axis == "ranks" else "log"
        axes.set(xscale=xscale, yscale="linear", ylim=(0, 1.1 * high))
    else:
        axes.set_ylim(low / 1.2, 1.2 * high)
        steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 200 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.set_xticks(x)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:.6g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_ylabel(what if what == QUANTITIES[1] else f"{what} (s)", **SMALL)
    return SWEEPS[found.axis].label


def _bars(axes: Any, found: Sweep, name: str, limits: Mapping[str, Limit]) -> str:
    """Draw the parts of the step of a strategy; return the title of the panel."""
    middle: dict[str, Any] = {"ha": "center", "va": "center", **SMALL}
    texts = iter(durations([one.projection.epoch for one in found.entries[name] if one.projection]))
    for place, entry in enumerate(found.entries[name]):
        one, base = entry.projection, 0.0
        if one is None:
            axes.text(place, 50, "not possible", rotation=90, **middle)
            continue
        for (part, seconds), color in zip(one.step.parts(one.loader).items(), COLORS, strict=False):
            share = 100 * seconds / one.seconds
            more = {} if entry.possible else {**MISSING, "color": color, "label": ""}
            axes.bar(place, share, 0.8, **{"bottom": base, "color": color, "label": part, **more})
            base += share
        axes.text(place, 116, next(texts), **middle)
        if ratio := found.virtual.get(name, {}).get(place):
            axes.plot(place, 100 * ratio, "o", color=INK, mec="white", label="virtual ranks")
    axes.bar(0, 0, **MISSING)
    axes.set_xticks(range(len(found.texts)), found.texts)
    axes.set(xlim=(-0.6, len(found.values) - 0.4), ylim=(0, 122), yticks=range(0, 101, 25))
    axes.set_ylabel("share of a step (%); above: time of an epoch", **SMALL)
    limit = limits.get(name)
    if limit is None or found.axis != "ranks":
        return name
    place = bisect_right(found.values, limit.ranks)
    if place < len(found.values):
        axes.axvline(place - 0.5, color=INK, ls="--", lw=1, label="limit")
    return f"{name}: up to {limit.ranks} ranks\n{limit.reason.partition(';')[0]}"

"""Plots of predictions: scaling, breakdown, memory and what-if sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydtnn.tools.perfmodel.oracle.ranking import Entry, best, first_of_kinds
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, Sweep
from pydtnn.utils.figures import PALETTE, save_figure

COLORS = (*PALETTE, "#222222", "#8c6d4f")

STYLE = {"axes.grid": True, "grid.color": "#e4e4e0"}
"""Properties of Matplotlib, besides those of all figures."""


def plot_all(folder: Path, found: Mapping[int, Sequence[Entry]], name: str) -> list[Path]:
    """Draw scaling, breakdown and memory into a folder.

    Parameters
    ----------
    folder : Path
        It is created if necessary.
    found : mapping of int to sequence of Entry
        Entries for each number of ranks, as from `Oracle.sweep`.
    name : str
        Title.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    ImportError
        If Matplotlib is not installed.
    """
    drawings = {
        "scaling": lambda axes: _scaling(axes, found),
        "breakdown": lambda axes: _breakdown(axes, found),
        "memory": lambda axes: _memory(axes, found),
    }
    return [_draw(folder / f"{what}.png", draw, name) for what, draw in drawings.items()]


def plot_sweep(folder: Path, sweep: Sweep, name: str) -> Path:
    """Draw a what-if sweep into a folder."""
    return _draw(folder / f"sweep_{sweep.axis}.png", lambda axes: _sweep(axes, sweep), name)


def _draw(path: Path, draw: Any, name: str) -> Path:
    def drawn(make: Any) -> Any:
        figure = make(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(name, loc="left", fontsize=9)
        return figure

    save_figure("oracle: --plots", path, drawn, STYLE, dpi=150)
    return path


def _lines(axes: Any, found: Mapping[int, Sequence[Entry]], measure: Any) -> None:
    """Draw a line for each kind of strategies, of the fastest ones that are possible."""
    possible = {n: [one for one in entries if one.possible] for n, entries in found.items()}
    columns = {n: first_of_kinds(entries, variants=False) for n, entries in possible.items()}
    kinds = sorted({kind for column in columns.values() for kind in column} - {"serial"})
    for color, kind in zip(COLORS, kinds, strict=False):
        points = {n: measure(column[kind]) for n, column in columns.items() if kind in column}
        axes.plot([*points], [*points.values()], "o-", color=color, label=kind)


def _scales(axes: Any, places: Mapping[float, str], over: str, what: str, **style: Any) -> None:
    """Label axes with logarithmic scales, the lower one at places with their texts."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([*places], [*places.values()], **style)
    axes.minorticks_off()
    axes.set_xlabel(over)
    axes.set_yscale("log")
    axes.set_ylabel(what)
    axes.legend()


def _scaling(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    _lines(axes, found, lambda entry: entry.projection.epoch)
    chosen = {n: one for n, entries in found.items() if (one := best(entries))}
    if chosen:
        ideal = [e.efficiency * e.projection.epoch for e in chosen.values() if e.projection]
        axes.plot([*chosen], ideal, "--", color="#999999", label="ideal", zorder=1)
    _scales(axes, {n: str(n) for n in found}, "ranks", "time of an epoch (s)")


def _memory(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    _lines(axes, found, lambda entry: entry.projection.memory.total / 1e9)
    what = "memory of a rank (GB), fastest strategy of each kind"
    _scales(axes, {n: str(n) for n in found}, "ranks", what)


def _breakdown(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    chosen = [one for entries in found.values() if (one := best(entries))]
    places = range(len(chosen))
    base = [0.0] * len(chosen)
    found_for = [entry.projection for entry in chosen if entry.projection]
    rows = [one.step.parts(one.loader) for one in found_for]
    for part, color in zip(rows[0] if rows else (), COLORS, strict=False):
        shares = [100 * row[part] / (sum(row.values()) or 1.0) for row in rows]
        if any(shares):
            axes.bar(places, shares, bottom=base, color=color, label=part, width=0.8)
        base = [a + b for a, b in zip(base, shares, strict=True)]
    words = [f"{entry.work.ranks}: {entry.work.strategy}" for entry in chosen]
    axes.set_xticks(places, words, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("share of a step (%)")
    axes.set_ylim(0, 100)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _sweep(axes: Any, sweep: Sweep) -> None:
    values = [point.value for point in sweep.points]
    for color, (name, entries) in zip(COLORS, sweep.entries.items(), strict=False):
        pairs = [
            (value, entry.projection.epoch)
            for value, entry in zip(values, entries, strict=True)
            if entry.projection is not None
        ]
        axes.plot(*zip(*pairs, strict=True), "o-", color=color, label=name) if pairs else None
    texts = {point.value: point.text for point in sweep.points}
    _scales(axes, texts, SWEEPS[sweep.axis], "time of an epoch (s)", fontsize=7)

"""Plots of predictions: scaling, breakdown, memory and what-if sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from pydtnn.perfmodel.oracle.ranking import Entry, best
from pydtnn.perfmodel.oracle.what_if import Sweep
from pydtnn.utils.files import write_file
from pydtnn.utils.imports import import_optional

COLORS = (
    *("#3470b5", "#d9693a", "#2a9a7c", "#a94fae", "#cf9a1f", "#7fa52f", "#cf4a75", "#6a5cc0"),
    *("#222222", "#8c6d4f"),
)

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e0",
    "legend.frameon": False,
    "svg.fonttype": "none",
}

PARTS = {
    "compute": "#3470b5",
    "exchanges of layers": "#d9693a",
    "sums of gradients": "#cf9a1f",
    "waits for stages": "#a94fae",
    "update": "#7fa52f",
    "Python": "#8fb3d9",
    "loader": "#777777",
}

AXES = {
    "batch": "global batch",
    "flops": "peak rate of a rank (flop/s)",
    "memory": "memory bandwidth of a rank (B/s)",
    "bandwidth": "bandwidth between hosts (B/s)",
    "latency": "latency between hosts (s)",
    "ranks": "ranks",
}


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
    matplotlib = import_optional("matplotlib", "matplotlib", "oracle: --plots")
    figures = import_optional("matplotlib.figure", "matplotlib", "oracle: --plots")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(name, loc="left", fontsize=9)
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file("oracle", path, buffer.getvalue())
    return path


def fastest_of_kinds(found: Mapping[int, Sequence[Entry]]) -> dict[str, dict[int, Entry]]:
    """Return the fastest possible entry of each kind of axes, for each number of ranks."""
    kinds: dict[str, dict[int, Entry]] = {}
    for ranks, entries in found.items():
        for entry in entries:  # the fastest ones first
            kind = entry.work.kind.partition(",")[0]
            if entry.possible and kind != "serial":
                kinds.setdefault(kind, {}).setdefault(ranks, entry)
    return kinds


def _lines(axes: Any, kinds: Mapping[str, Mapping[int, Entry]], measure: Any) -> None:
    for color, (kind, entries) in zip(COLORS, sorted(kinds.items()), strict=False):
        values = [*map(measure, entries.values())]
        axes.plot([*entries], values, "o-", color=color, label=kind)


def _over_ranks(axes: Any, ranks: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_yscale("log")
    axes.set_ylabel(what)
    axes.legend()


def _scaling(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    kinds = fastest_of_kinds(found)
    _lines(axes, kinds, lambda entry: entry.projection.epoch)
    chosen = {n: one for n, entries in found.items() if (one := best(entries))}
    if chosen:
        ideal = [e.efficiency * e.projection.epoch for e in chosen.values() if e.projection]
        axes.plot([*chosen], ideal, "--", color="#999999", label="ideal", zorder=1)
    _over_ranks(axes, [*found], "time of an epoch (s)")


def _memory(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    _lines(axes, fastest_of_kinds(found), lambda entry: entry.projection.memory.total / 1e9)
    _over_ranks(axes, [*found], "memory of a rank (GB), fastest strategy of each kind")


def _breakdown(axes: Any, found: Mapping[int, Sequence[Entry]]) -> None:
    chosen = [one for entries in found.values() if (one := best(entries))]
    places = range(len(chosen))
    base = [0.0] * len(chosen)
    found_for = [entry.projection for entry in chosen if entry.projection]
    rows = [one.step.parts(one.loader) for one in found_for]
    for part, color in PARTS.items():
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
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [point.text for point in sweep.points], fontsize=7)
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel(AXES[sweep.axis])
    axes.set_ylabel("time of an epoch (s)")
    axes.legend()

"""Scaling: the throughput of runs with different numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydtnn.report.phases import COLOURS, activities
from pydtnn.report.runs import Run
from pydtnn.report.section import GREY, Figure, Section, Table, colour

VARIANTS = ("model", "model_options", "dataset", "dtype", "device", "threads", "exact")
"""Options by which runs are divided into series, where they differ."""

BETWEEN_RANKS = (
    *("scheme", "scheme_options", "compress", "compress_options", "allreduce"),
    *("sync_batch_norm", "plan"),
)
"""Further ones, which have no meaning for one rank: such a run is part of several series."""

STEP = ("compute", "communication", "waiting for data")


@dataclass
class Point:
    """A run in a series.

    Attributes
    ----------
    run : Run
    ranks : int
    rate : float
        Samples per second.
    speedup, efficiency : float
        Relative to the run with the fewest ranks.
    """

    run: Run
    ranks: int
    rate: float
    speedup: float
    efficiency: float


def scaling(runs: Sequence[Run]) -> Section:
    """Return throughput and efficiency by ranks."""
    section = Section("scaling", "Scaling")
    series = _series(runs)
    if not series:
        section.absent = "it needs measured runs with different numbers of ranks: name several RUNs"
        return section
    section.figures = [*_figures(series), _step(series)]
    section.tables = [_table(series)]
    section.text = (
        "Throughput is the median over the measured intervals. Speed-up and efficiency are "
        "relative to the run with the fewest ranks: efficiency is the throughput per rank divided "
        "by that of this run."
    )
    if len({_batch(point) for points in series.values() for point in points}) > 1:
        section.text += " The samples per rank and step differ between the runs."
    return section


def _series(runs: Sequence[Run]) -> dict[str, list[Point]]:
    """Return the points of each series, in the order of the ranks, by the options that differ."""
    measured = [
        (run, size, rate)
        for run in runs
        if (size := run.size) and (rate := run.samples_per_second())
    ]
    several = [item for item in measured if item[1] > 1]
    own = _differing(VARIANTS, [run for run, _, _ in measured])
    between = _differing(BETWEEN_RANKS, [run for run, _, _ in several])
    groups: dict[str, list[tuple[Run, int, float]]] = {}
    for item in several:
        groups.setdefault(_describe(item[0], own + between), []).append(item)
    found = {}
    for name, group in groups.items():
        variant = _describe(group[0][0], own)
        group += [one for one in measured if one[1] == 1 and _describe(one[0], own) == variant]
        group.sort(key=lambda item: item[1])
        _, fewest, base = group[0]
        if fewest < group[-1][1]:
            found[name] = [
                Point(run, size, rate, rate / base, rate / base * fewest / size)
                for run, size, rate in group
            ]
    return found


def _differing(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    return [n for n in names if len({str(run.configuration.get(n)) for run in runs}) > 1]


def _describe(run: Run, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {run.configuration.get(name)}" for name in names)


def _figures(series: Mapping[str, Sequence[Point]]) -> list[Figure]:
    """Return throughput and efficiency over the ranks, with the ideal."""
    ranks = sorted({point.ranks for points in series.values() for point in points})
    scale = "log" if ranks[-1] > 8 * ranks[0] else "linear"
    x = {"title": "ranks", "tickvals": ranks, "type": scale, "ticktext": [*map(str, ranks)]}
    rates: list[dict[str, Any]] = []
    efficiencies: list[dict[str, Any]] = []
    for index, (name, points) in enumerate(series.items()):
        first = points[0]
        own = [point.ranks for point in points]
        shown: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name or "measured",
            "x": own,
            "line": {"color": colour(index), "width": 1.8},
            "marker": {"size": 8},
        }
        ideal = [first.rate / first.ranks * count for count in own]
        rates.append(_ideal(own, ideal, index == 0))
        rates.append({**shown, "y": [point.rate for point in points]})
        efficiencies.append({**shown, "y": [100 * point.efficiency for point in points]})
    efficiencies.insert(0, _ideal(ranks, [100.0] * len(ranks), True))
    top = max(110.0, *(1.1 * value for trace in efficiencies for value in trace["y"]))
    y = {"title": "samples/s", "type": scale, "rangemode": "tozero"}
    shares = {"title": "efficiency (%)", "range": [0, top]}
    return [
        Figure("Throughput", rates, x, y),
        Figure("Parallel efficiency", efficiencies, x, shares),
    ]


def _ideal(x: Sequence[int], y: Sequence[float], legend: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal",
        "showlegend": legend,
        "x": x,
        "y": y,
        "line": {"color": GREY, "dash": "dot", "width": 1.5},
    }


def _step(series: Mapping[str, Sequence[Point]]) -> Figure:
    """Return the parts of a mean step of each run."""
    every = [point for found in series.values() for point in found if point.run.ranks]
    points = [*{id(point.run): point for point in every}.values()]
    parts = [_mean_step(point.run) for point in points]
    data = [
        {
            "type": "bar",
            "name": name,
            "x": [point.run.label for point in points],
            "y": [1e3 * part[name] for part in parts],
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"%{{x}}, {name}: %{{y:.3g}} ms<extra></extra>",
        }
        for name in STEP
    ]
    return Figure(
        "Time per step",
        data,
        {"type": "category"},
        {"title": "time per step (ms)", "rangemode": "tozero"},
        "Means over steps and ranks; communication is time in which a rank was blocked.",
        layout={"barmode": "stack", "bargap": 0.5},
    )


def _mean_step(run: Run) -> dict[str, float]:
    """Return the seconds of each part of `STEP` per step, the mean over all ranks."""
    ranks = run.totals()
    alike = [i for i, found in enumerate(run.ranks) if len(found) == len(ranks)]
    steps = sum(run.intervals[i].steps for i in alike)
    found = [activities(rank) for rank in ranks]
    return {name: sum(each[name] for each in found) / len(found) / steps for name in STEP}


def _table(series: Mapping[str, Sequence[Point]]) -> Table:
    rows = []
    for points in series.values():
        for point in points:
            totals = point.run.totals()
            steps = sum(rank["steps"] for rank in totals)
            blocked = sum(rank["communication"] for rank in totals) / steps if steps else 0.0
            rows.append(
                [
                    point.run.label,
                    str(point.ranks),
                    str(_batch(point)),
                    f"{point.rate:,.0f}",
                    f"{point.speedup:.2f}",
                    f"{100 * point.efficiency:.0f} %",
                    f"{100 * blocked:.1f} %",
                    f"{max(rank['peak_memory'] for rank in totals) / 1e6:,.0f} MB",
                ]
            )
    columns = (
        "run",
        "ranks",
        "samples per rank and step",
        "samples/s",
        "speed-up",
        "efficiency",
        "steps blocked by messages",
        "peak memory per rank",
    )
    return Table("", columns, rows, numbers=True)


def _batch(point: Point) -> int | str:
    """Return the samples of a rank in a step, "?" if they are unknown."""
    total = point.run.about.get("global_batch_size")
    return -(-total // point.ranks) if isinstance(total, int) else "?"

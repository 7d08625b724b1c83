"""Scaling: the throughput of runs with different numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from pydtnn.tools.report.runs import RunView
from pydtnn.tools.report.section import COLOURS, Figure, Section, Table, line, stacked_bars
from pydtnn.tools.report.steps import activities, mean_of

STEP = ("compute", "communication", "data")
"""Measured activities of a step."""

VARIANTS = ("model", "model_options", "dataset", "dtype", "device", "threads", "exact")
"""Options by which runs are divided into series, where they differ."""

BETWEEN_RANKS = (
    *("scheme", "scheme_options", "compress", "compress_options", "allreduce"),
    *("sync_batch_norm", "plan"),
)
"""Further ones, which have no meaning for one rank: such a run is part of several series."""

LOOKS = (("solid", "circle"), ("dash", "square"), ("dashdot", "diamond"), ("longdash", "cross"))
"""Line and symbol of each series; its points have the colours of the runs."""

MAX_EFFICIENCY = 1.05
"""Efficiency above which the reference is not trusted."""


@dataclass
class RunPoint:
    """A run in a series.

    Attributes
    ----------
    run : Run
    ranks : int
    rate : float
        Samples per second, the median of the intervals.
    speedup, efficiency : float
        Relative to the run with the fewest ranks.
    low, high : float
        `efficiency` if the quartiles of the intervals of both runs take the place of their medians:
        the slowest quarter of this run over the fastest of the other, and the reverse.
    """

    run: RunView
    ranks: int
    rate: float
    speedup: float
    efficiency: float
    low: float
    high: float


def scaling(runs: Sequence[RunView]) -> Section:
    """Return throughput and efficiency by ranks."""
    result = Section("scaling", "Scaling")
    series, alone = _series(runs)
    if not series:
        result.absent = "it needs measured runs with different numbers of ranks: name several RUNs"
        if len(alone) > 1 and len({run.size for run, _ in alone}) > 1:
            result.absent += f"; {'; '.join(_why_alone(*one) for one in alone)}"
        return result
    result.figures = [*_figures(series), _step(series)]
    result.legend = {
        **{run.title: f"{run.colour} point" for run in runs},
        **{
            name or "measured": f"{COLOURS['other']} {LOOKS[i % len(LOOKS)][0]}"
            for i, name in enumerate(series)
        },
        "ideal": f"{COLOURS['other']} dot",
        **{part: COLOURS[part] for part in STEP},
    }
    result.tables = [_table(series)]
    sentences = [
        "Throughput is the median over the measured intervals, with their quartiles. Speed-up and "
        "efficiency are relative to the run with the fewest ranks: efficiency is the throughput "
        "per rank divided by that of this run; its range is that of the quartiles of both.",
    ]
    if len({_batch(point) for points in series.values() for point in points}) > 1:
        sentences.append("The samples per rank and step differ between the runs.")
    result.text = " ".join([*sentences, *_warnings(series, alone)])
    return result


def _warnings(
    series: Mapping[str, Sequence[RunPoint]], alone: Sequence[tuple[RunView, str]]
) -> list[str]:
    """Return what a reader of the efficiencies must know, as sentences."""
    points = [point for found in series.values() for point in found]
    runs = {point.run.label: point.run for point in points}
    crowded = [run for run in runs.values() if run.cores and run.threads > run.cores]
    found = [
        f"{run.label} has more threads than cores ({run.places()}): its efficiency is not that of "
        "as many cores."
        for run in crowded
    ]
    above = [point for point in points if point.efficiency > MAX_EFFICIENCY]
    found += [
        f"The efficiency of {point.run.label}, {100 * point.efficiency:.0f} %, is above 100 %: the "
        "run with the fewest ranks was slowed down, by other programs for example, or fits worse "
        "into the caches; measure both again."
        for point in above
    ]
    return found + [f"Left out: {_why_alone(*one)}." for one in alone]


def _why_alone(run: RunView, why: str) -> str:
    return f"{run.label}, {why}"


def _series(runs: Sequence[RunView]) -> tuple[dict[str, list[RunPoint]], list[tuple[RunView, str]]]:
    """Return the points of each series by the options that differ, and the runs in none, with why.

    Points are in the order of the ranks.
    """
    measured = [
        (run, size, rate)
        for run in runs
        if (size := run.size) and (rate := run.samples_per_second())
    ]
    several = [item for item in measured if item[1] > 1]
    own = _differing(VARIANTS, [run for run, _, _ in measured])
    between = _differing(BETWEEN_RANKS, [run for run, _, _ in several])
    groups: dict[str, list[tuple[RunView, int, float]]] = {}
    for item in several:
        groups.setdefault(_describe(item[0], own + between), []).append(item)
    found = {}
    for name, group in groups.items():
        variant = _describe(group[0][0], own)
        group += [one for one in measured if one[1] == 1 and _describe(one[0], own) == variant]
        group.sort(key=lambda item: item[1])
        if group[0][1] < group[-1][1]:
            found[name] = [_point(run, size, group[0][0]) for run, size, _ in group]
    shown = {id(point.run) for points in found.values() for point in points}
    known = {id(run) for run, _, _ in measured}
    alone = [
        (run, _reason(run, own + between) if id(run) in known else "which was not measured")
        for run in runs
        if id(run) not in shown
    ]
    return found, alone


def _reason(run: RunView, names: Sequence[str]) -> str:
    same = _describe(run, names)
    others = f" and the same options ({same})" if same else ""
    return f"as no run has another number of ranks than {run.size}{others}"


def _point(run: RunView, size: int, first: RunView) -> RunPoint:
    """Return the point of a run in a series whose first run has the fewest ranks."""
    (low, rate, high), (slow, base, fast) = run.spread(), first.spread()
    share = (first.size or 1) / size
    if run is first:
        low = high = slow = fast = base
    speedup = rate / base
    return RunPoint(
        run, size, rate, speedup, speedup * share, low / fast * share, high / slow * share
    )


def _differing(names: Sequence[str], runs: Sequence[RunView]) -> list[str]:
    return [n for n in names if len({str(run.configuration.get(n)) for run in runs}) > 1]


def _describe(run: RunView, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {run.configuration.get(name)}" for name in names)


def _figures(series: Mapping[str, Sequence[RunPoint]]) -> list[Figure]:
    """Return throughput and efficiency over the ranks, with the ideal."""
    ranks = sorted({point.ranks for points in series.values() for point in points})
    scale = "log" if ranks[-1] > 8 * ranks[0] else "linear"
    x = {"title": "ranks", "tickvals": ranks, "type": scale, "ticktext": [*map(str, ranks)]}
    rates: list[dict[str, Any]] = []
    efficiencies: list[dict[str, Any]] = []
    for (dash, symbol), (name, points) in zip(cycle(LOOKS), series.items(), strict=False):
        first = points[0]
        own = [point.ranks for point in points]
        colours = [point.run.colour for point in points]
        shown = {
            **line(name or "measured", own, None, COLOURS["other"], dash=dash),
            "mode": "lines+markers",
            "marker": {"size": 9, "symbol": symbol, "color": colours},
        }
        rates.append(_ideal(own, [first.rate / first.ranks * count for count in own]))
        quartiles = [point.run.spread() for point in points]
        spread = _between([(low, high) for low, _, high in quartiles], [p.rate for p in points])
        rates.append({**shown, "y": [point.rate for point in points], "error_y": spread})
        values = [100 * point.efficiency for point in points]
        spread = _between([(100 * p.low, 100 * p.high) for p in points], values)
        efficiencies.append({**shown, "y": values, "error_y": spread})
    efficiencies.insert(0, _ideal(ranks, [100.0] * len(ranks)))
    top = max(110.0, *(105 * point.high for points in series.values() for point in points))
    y = {"title": "samples/s", "type": scale, "rangemode": "tozero"}
    shares = {"title": "efficiency (%)", "range": [0, top]}
    return [
        Figure("Throughput", rates, x, y),
        Figure("Parallel efficiency", efficiencies, x, shares),
    ]


def _between(ends: Sequence[tuple[float, float]], middle: Sequence[float]) -> dict[str, Any]:
    """Return the error bars from one value to another around each middle."""
    return {
        "type": "data",
        "array": [max(0.0, high - value) for (_, high), value in zip(ends, middle, strict=True)],
        "arrayminus": [max(0.0, value - low) for (low, _), value in zip(ends, middle, strict=True)],
        "color": COLOURS["other"],
        "thickness": 1,
        "width": 3,
    }


def _ideal(x: Sequence[int], y: Sequence[float]) -> dict[str, Any]:
    return line("ideal", x, y, COLOURS["other"], width=1.5, dash="dot")


def _step(series: Mapping[str, Sequence[RunPoint]]) -> Figure:
    """Return the parts of a mean step of each run."""
    points = [*{id(p.run): p for found in series.values() for p in found if p.run.ranks}.values()]
    parts = [mean_step(point.run) for point in points]
    return stacked_bars(
        "Time per step",
        [point.run.label for point in points],
        {name: [1e3 * part[name] for part in parts] for name in STEP},
        {"title": "time per step (ms)", "rangemode": "tozero"},
        {"type": "category"},
        "Means over steps and ranks; communication is time in which a rank was blocked.",
        gap=0.5,
    )


def mean_step(run: RunView) -> dict[str, float]:
    """Return the seconds of each activity of `STEP` per step, the mean over all ranks."""
    ranks = [activities(rank) for rank in run.totals()]
    measured = zip(run.intervals, run.ranks, strict=True)
    steps = sum(epoch.steps for epoch, found in measured if len(found) == len(ranks))
    return {name: mean_of(ranks, name) / steps for name in STEP}


def _batch(point: RunPoint) -> int | str:
    """Return the samples of a rank in a step, "?" if they are unknown."""
    total = point.run.about.get("global_batch_size")
    return -(-total // point.ranks) if isinstance(total, int) else "?"


def _table(series: Mapping[str, Sequence[RunPoint]]) -> Table:
    records = []
    for point in (point for points in series.values() for point in points):
        totals = point.run.totals()
        steps = sum(rank["steps"] for rank in totals)
        blocked = sum(rank["communication"] for rank in totals) / steps if steps else 0.0
        low, high = (f"{100 * share:.0f}" for share in (point.low, point.high))
        records.append(
            {
                "run": point.run.label,
                "ranks and cores": point.run.places(),
                "samples per rank and step": str(_batch(point)),
                "samples/s (quartiles)": "{1:,.0f} ({0:,.0f} to {2:,.0f})".format(
                    *point.run.spread()
                ),
                "speed-up": f"{point.speedup:.2f}",
                "efficiency (range)": f"{100 * point.efficiency:.0f} % ({low} to {high} %)",
                "steps blocked by messages": f"{100 * blocked:.1f} %",
                "peak memory per rank": f"{max(r['peak_memory'] for r in totals) / 1e6:,.0f} MB",
            }
        )
    return Table.of("", records, numbers=True)

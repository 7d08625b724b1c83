"""Where each rank has spent its time, as runs measure it without a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydtnn.report.runs import Run
from pydtnn.report.section import COLOURS, Figure, Section

PARTS = ("compute", "communication", "data", "evaluation", "callbacks")
"""Activities of a rank, in this order; see `pydtnn.report.section.COLOURS`."""

SHOWN = 32
"""Maximum number of ranks in a figure."""

EPOCHS = 100
"""Maximum number of epochs in a figure."""


def phases(runs: Sequence[Run]) -> Section:
    """Return the seconds of each rank per activity."""
    section = Section("phases", "Time per rank")
    measured = [run for run in runs if run.ranks]
    if not measured:
        section.absent = (
            "no run has the file measurements.jsonl, which python -m pydtnn.train and the "
            "callback MeasurementWriter write"
        )
        return section
    longest = max(rank["total"] for run in measured for rank in run.totals())
    slowest = max(mean_of(ranks, "total") for run in measured for ranks in run.ranks)
    section.figures = [
        *(_per_rank(run, 1.02 * longest) for run in measured),
        *(_per_epoch(run, 1.02 * slowest) for run in measured if len(run.ranks) > 1),
    ]
    section.legend = {name: COLOURS[name] for name in PARTS}
    section.text = (
        "Sums over all measured epochs, and means over the ranks for each epoch. Communication is "
        "time in which a rank was blocked by a message during a step, not time in which messages "
        "travelled while it computed. Data is the wait for a batch. The rest of the time is that "
        "of callbacks, such as writing checkpoints."
    )
    return section


def activities(rank: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a rank in each activity of `PARTS`, which add up to its total."""
    named = rank["steps"] + rank["data"] + rank["evaluation"]
    return {
        "compute": max(0.0, rank["steps"] - rank["communication"]),
        "communication": rank["communication"],
        "data": rank["data"],
        "evaluation": rank["evaluation"],
        "callbacks": max(0.0, rank["total"] - named),
    }


def _per_rank(run: Run, longest: float) -> Figure:
    ranks = [activities(rank) for rank in run.totals()]
    shown = chosen([rank["compute"] for rank in ranks], SHOWN)
    names = [f"rank {rank}" for rank in shown]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [ranks[rank][name] for rank in shown],
            "y": names,
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"%{{y}}, {name}: %{{x:.3g}} s<extra></extra>",
        }
        for name in PARTS
    ]
    caption = "" if len(shown) == len(ranks) else f"{len(shown)} of {len(ranks)} ranks, among them "
    return Figure(
        f"{run.label}: time of each rank",
        data,
        {"title": "time (s)", "range": [0, longest]},
        {"autorange": "reversed", "ticks": "", "showgrid": False},
        caption and caption + "the slowest and the fastest in compute.",
        height=70 + 28 * max(2, len(shown)),
        layout={"barmode": "stack", "bargap": 0.3},
    )


def mean_of(ranks: Sequence[Mapping[str, float]], part: str) -> float:
    """Return the mean of a number over the ranks."""
    return sum(rank[part] for rank in ranks) / len(ranks)


def _per_epoch(run: Run, longest: float) -> Figure:
    every = -(-len(run.ranks) // EPOCHS)
    shown = [
        (epoch.epoch, [activities(rank) for rank in ranks])
        for epoch, ranks in zip(run.intervals[::every], run.ranks[::every], strict=True)
    ]
    data = [
        {
            "type": "bar",
            "name": name,
            "x": [epoch for epoch, _ in shown],
            "y": [mean_of(ranks, name) for _, ranks in shown],
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"epoch %{{x}}, {name}: %{{y:.3g}} s<extra></extra>",
        }
        for name in PARTS
    ]
    return Figure(
        f"{run.label}: time of each epoch",
        data,
        {"title": "epoch", "showgrid": False, **({"dtick": 1} if len(shown) <= 12 else {})},
        {"title": "time (s)", "range": [0, longest]},
        f"One of {every} epochs is shown." if every > 1 else "",
        height=260,
        layout={"barmode": "stack", "bargap": 0.3},
    )


def chosen(values: Sequence[float], count: int) -> list[int]:
    """Return the numbers of at most `count` ranks: all, or some from smallest to largest value."""
    order = sorted(range(len(values)), key=values.__getitem__)
    if len(order) > count:
        order = [order[index * (len(order) - 1) // (count - 1)] for index in range(count)]
    return sorted(order)

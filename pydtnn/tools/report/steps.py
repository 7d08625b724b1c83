"""Where the time went: of each rank in all epochs, and in the traced steps, with efficiencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydtnn.tools.report.runs import MEASUREMENTS, TRACE, RunTrace, RunView
from pydtnn.tools.report.section import (
    COLOURS,
    Figure,
    Section,
    Table,
    every,
    section,
    spread_places,
    stacked_bars,
)
from pydtnn.tools.report.timeline import group_of
from pydtnn.tools.tracing.analysis import (
    CriticalPaths,
    describe_label,
    efficiency,
    slow_ranks,
    usage,
)
from pydtnn.tools.tracing.analysis.blocks import COMMUNICATION
from pydtnn.utils.observer import Kind

ACTIVITIES = ("compute", "communication", "data", "evaluation", "callbacks")
"""Activities of a rank, in this order; see `pydtnn.tools.report.section.COLOURS`."""

MAX_RANKS = 32
"""Maximum number of ranks in a figure."""

MAX_EPOCHS = 100
"""Maximum number of epochs in a figure."""

MAX_SLOW = 10
"""Maximum number of layers and phases of a run that are slow on a rank."""

MAX_LATE = 3
"""Maximum number of causes of late steps of a run."""

PARTS = (
    *("forward", "backward", "loss", "update", "communication", "waiting for a rank", "data"),
    *("callbacks", "other"),
)
"""Activities of a step, in this order; see `pydtnn.tools.report.section.COLOURS`."""

LAYERS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}

MAX_PATHS = 50
"""Maximum number of steps whose critical paths are followed."""


@section(
    "phases",
    "Time per rank",
    MEASUREMENTS,
    "Sums over all measured epochs, and means over the ranks for each epoch. Communication is time "
    "in which a rank was blocked by a message during a step, not time in which messages travelled "
    "while it computed. Data is the wait for a batch. The rest of the time is that of callbacks, "
    "such as writing checkpoints.",
)
def phases(
    result: Section, measured: Sequence[tuple[RunView, list[list[dict[str, float]]]]]
) -> None:
    """Fill the section with the seconds of each rank per activity."""
    longest = max(rank["total"] for run, _ in measured for rank in run.totals())
    slowest = max(mean_of(ranks, "total") for _, epochs in measured for ranks in epochs)
    result.figures = [
        *(_per_rank(run, 1.02 * longest) for run, _ in measured),
        *(_per_epoch(run, 1.02 * slowest) for run, epochs in measured if len(epochs) > 1),
    ]
    result.legend = {name: COLOURS[name] for name in ACTIVITIES}


def activities(rank: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a rank in each activity of `ACTIVITIES`, which add up to its total."""
    named = rank["steps"] + rank["data"] + rank["evaluation"]
    return {
        "compute": max(0.0, rank["steps"] - rank["communication"]),
        "communication": rank["communication"],
        "data": rank["data"],
        "evaluation": rank["evaluation"],
        "callbacks": max(0.0, rank["total"] - named),
    }


def mean_of(ranks: Sequence[Mapping[str, float]], part: str) -> float:
    """Return the mean of a number over the ranks."""
    return sum(rank[part] for rank in ranks) / len(ranks)


def _per_rank(run: RunView, longest: float) -> Figure:
    ranks = [activities(rank) for rank in run.totals()]
    shown = spread_places([rank["compute"] for rank in ranks], MAX_RANKS)
    caption = f"{len(shown)} of {len(ranks)} ranks, among them the slowest and the fastest in "
    return stacked_bars(
        f"{run.label}: time of each rank",
        [f"rank {rank}" for rank in shown],
        {name: [ranks[rank][name] for rank in shown] for name in ACTIVITIES},
        {"title": "time (s)", "range": [0, longest]},
        caption="" if len(shown) == len(ranks) else f"{caption}compute.",
        unit="s",
    )


def _per_epoch(run: RunView, longest: float) -> Figure:
    step = every(len(run.ranks), MAX_EPOCHS)
    epochs = [epoch.epoch for epoch in run.intervals[::step]]
    shown = [[activities(rank) for rank in ranks] for ranks in run.ranks[::step]]
    return stacked_bars(
        f"{run.label}: time of each epoch",
        epochs,
        {name: [mean_of(ranks, name) for ranks in shown] for name in ACTIVITIES},
        {"title": "time (s)", "range": [0, longest]},
        {"title": "epoch", "showgrid": False, **({"dtick": 1} if len(shown) <= 12 else {})},
        f"One of {step} epochs is shown." if step > 1 else "",
        unit="s",
        place="epoch %{x}",
        height=260,
    )


@section(
    "steps",
    "Parts of a step",
    TRACE,
    "Means over the traced steps, each with the callbacks before it. Waiting for a rank is time in "
    "a call or wait before the other rank had sent its message or entered the operation; "
    "communication is the rest of the time in calls and waits. Parallel efficiency is useful time "
    "over total time: load balance x serialisation x transfer (POP).",
)
def steps(result: Section, traced: Sequence[tuple[RunView, RunTrace]]) -> None:
    """Fill the section with times per rank and activity, efficiencies and ranks that are late."""
    measured = [(run, milliseconds_of(trace)) for run, trace in traced]
    longest = max(sum(rank.values()) for _, ranks in measured for rank in ranks)
    for run, ranks in measured:
        shown = spread_places([rank["forward"] + rank["backward"] for rank in ranks], MAX_RANKS)
        figure = stacked_bars(
            run.label,
            [f"rank {rank}" for rank in shown],
            {name: [ranks[rank][name] for rank in shown] for name in PARTS},
            {"title": "time per step (ms)", "range": [0, 1.02 * longest]},
            wide=len(measured) == 1,
        )
        result.figures = [*result.figures, figure]
    result.legend = {name: COLOURS[name] for name in PARTS}
    result.tables = [_efficiencies(traced), *_slow(traced), *_late(traced)]


def milliseconds_of(trace: RunTrace) -> list[dict[str, float]]:
    """Return for each rank the mean ms per step in each activity of `PARTS`."""
    seconds = trace.labels.seconds(trace.timeline).mean(axis=1)  # (labels, ranks)
    scale = 1e3 / len(trace.steps)
    ranks = []
    for used in usage(trace.timeline, trace.blocks):
        parts = dict.fromkeys(PARTS, 0.0)
        for (kind, name), value in zip(trace.labels.table, seconds[:, used.rank], strict=True):
            if (kind, name) != COMMUNICATION:
                parts[LAYERS.get(kind) or group_of(name)] += 1e3 * float(value)
        parts["communication"] += scale * used.communication
        parts["waiting for a rank"] = scale * used.waiting
        parts["other"] += max(0.0, scale * used.total - sum(parts.values()))  # between phases
        ranks.append(parts)
    return ranks


def _efficiencies(traced: Sequence[tuple[RunView, RunTrace]]) -> Table:
    records = []
    for run, trace in traced:
        parts = efficiency(trace.timeline, trace.blocks)
        assert parts is not None  # there are steps
        records.append(
            {
                "run": run.label,
                "steps": str(len(trace.steps)),
                "median": f"{trace.timeline.steps.duration / 1e6:.2f} ms",
                "ranks and cores": run.places(),
                "parallel efficiency": f"{100 * parts.parallel:.1f} %",
                "load balance": f"{100 * parts.load_balance:.1f} %",
                "serialisation": f"{100 * parts.serialisation:.1f} %",
                "transfer": f"{100 * parts.transfer:.1f} %",
            }
        )
    return Table.of("", records, numbers=True)


def _slow(traced: Sequence[tuple[RunView, RunTrace]]) -> list[Table]:
    """Return the table of what is slower on a rank than on the others, if there is such a rank."""
    records = [
        {
            "run": run.label,
            "rank": f"rank {slow.rank}",
            "where": describe_label(slow.kind, slow.name),
            "per step": f"{1e3 * slow.seconds:.3g} ms",
            "other ranks": f"{1e3 * slow.others:.3g} ms",
            "excess, share of the step": f"{100 * slow.share:.0f} %",
        }
        for run, trace in traced
        for slow in slow_ranks(trace.timeline, trace.labels)[:MAX_SLOW]
        if slow.others  # the layers of another stage of a pipeline are on one rank only
    ]
    return [Table.of("Slower than the other ranks", records)] if records else []


def _late(traced: Sequence[tuple[RunView, RunTrace]]) -> list[Table]:
    """Return the table of what made steps late: the greatest excess on their critical paths."""
    records = []
    for run, trace in traced:
        paths = CriticalPaths(trace.timeline, trace.blocks)
        positions = range(0, len(trace.steps), every(len(trace.steps), MAX_PATHS))
        late: dict[tuple[int, Kind, str], list[float]] = {}
        for part in (path.late for path in map(paths.find, positions) if path.late):
            late.setdefault((part.rank, part.kind, part.name), []).append(part.excess)
        most = sorted(late.items(), key=lambda item: -len(item[1]))[:MAX_LATE]
        records += [
            {
                "run": run.label,
                "rank": f"rank {rank}",
                "where": describe_label(kind, name),
                "steps": f"{len(excess)} of {len(positions)}",
                "mean excess": f"{1e3 * sum(excess) / len(excess):.3g} ms",
            }
            for (rank, kind, name), excess in most
        ]
    return [Table.of("What made steps late (critical path)", records)] if records else []

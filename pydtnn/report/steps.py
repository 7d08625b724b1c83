"""Where the time of the traced steps went, on which rank, and how efficient they were."""

from __future__ import annotations

from collections.abc import Sequence

from pydtnn.report.runs import SHOWN, Run, Traced, chosen, why_untraced
from pydtnn.report.section import COLOURS, Figure, Section, Table
from pydtnn.report.timeline import group_of
from pydtnn.tracing.analysis import (
    CriticalPaths,
    describe_label,
    efficiency,
    slow_ranks,
    usage,
)
from pydtnn.tracing.analysis.blocks import COMMUNICATION
from pydtnn.utils.observer import Kind

PARTS = (
    *("forward", "backward", "loss", "update", "communication", "waiting for a rank", "data"),
    *("callbacks", "other"),
)
"""Activities of a step, in this order; see `pydtnn.report.section.COLOURS`."""

LAYERS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}

LATE = "What made steps late (critical path)"

PATHS = 50
"""Maximum number of steps whose critical paths are followed."""


def steps(runs: Sequence[Run]) -> Section:
    """Return the time of the steps per rank and activity, efficiencies and ranks that are late."""
    section = Section("steps", "Parts of a step")
    traced = [(run, run.traced) for run in runs if run.traced]
    if not traced:
        section.absent = why_untraced(runs)
        return section
    found = [(run, seconds_of(trace)) for run, trace in traced]
    longest = max(sum(rank.values()) for _, ranks in found for rank in ranks)
    section.figures = [_figure(run, ranks, 1020 * longest, len(found) == 1) for run, ranks in found]
    section.legend = {name: COLOURS[name] for name in PARTS}
    section.tables = [_efficiencies(traced), *_slow(traced), *_late(traced)]
    section.text = (
        "Means over the traced steps, each with the callbacks before it. Waiting for a rank is "
        "time in a call or wait before the other rank had sent its message or entered the "
        "operation; communication is the rest of the time in calls and waits. Parallel efficiency "
        "is useful time over total time: load balance x serialisation x transfer (POP)."
    )
    return section


def seconds_of(trace: Traced) -> list[dict[str, float]]:
    """Return for each rank the mean seconds per step in each activity of `PARTS`."""
    seconds = trace.labels.seconds(trace.timeline).mean(axis=1)  # (labels, ranks)
    count = len(trace.steps)
    ranks = []
    for used in usage(trace.timeline, trace.blocks):
        found = dict.fromkeys(PARTS, 0.0)
        for (kind, name), value in zip(trace.labels.table, seconds[:, used.rank], strict=True):
            if (kind, name) != COMMUNICATION:
                found[LAYERS.get(kind) or group_of(name)] += float(value)
        found["communication"] += used.communication / count
        found["waiting for a rank"] = used.waiting / count
        found["other"] += max(0.0, used.total / count - sum(found.values()))  # between phases
        ranks.append(found)
    return ranks


def _figure(run: Run, ranks: Sequence[dict[str, float]], longest: float, wide: bool) -> Figure:
    shown = chosen([rank["forward"] + rank["backward"] for rank in ranks], SHOWN)
    names = [f"rank {rank}" for rank in shown]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [1e3 * ranks[rank][name] for rank in shown],
            "y": names,
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} ms<extra></extra>",
        }
        for name in PARTS
    ]
    return Figure(
        run.label,
        data,
        {"title": "time per step (ms)", "range": [0, longest]},
        {"autorange": "reversed", "ticks": "", "showgrid": False},
        height=70 + 28 * max(2, len(shown)),
        wide=wide,
        layout={"barmode": "stack", "bargap": 0.3},
    )


def _efficiencies(traced: Sequence[tuple[Run, Traced]]) -> Table:
    columns = ["run", "steps", "median", "ranks and cores", "parallel efficiency"]
    columns += ["load balance", "serialisation", "transfer"]
    rows = []
    for run, trace in traced:
        found = efficiency(trace.timeline, trace.blocks)
        assert found is not None  # there are steps
        values = found.parallel, found.load_balance, found.serialisation, found.transfer
        duration = trace.timeline.steps.duration / 1e6
        shares = [f"{100 * value:.1f} %" for value in values]
        steps = str(len(trace.steps))
        rows.append([run.label, steps, f"{duration:.2f} ms", run.places(), *shares])
    return Table("", columns, rows, numbers=True, sortable=True)


def _slow(traced: Sequence[tuple[Run, Traced]]) -> list[Table]:
    """Return the table of what is slower on a rank than on the others, if there is such a rank."""
    rows = [
        [
            run.label,
            f"rank {slow.rank}",
            describe_label(slow.kind, slow.name),
            f"{1e3 * slow.seconds:.3g} ms",
            f"{1e3 * slow.others:.3g} ms",
            f"{100 * slow.share:.0f} %",
        ]
        for run, trace in traced
        for slow in slow_ranks(trace.timeline, trace.labels)[:10]
        if slow.others  # the layers of another stage of a pipeline are on one rank only
    ]
    columns = ["run", "rank", "where", "per step", "other ranks", "excess, share of the step"]
    return [Table("Slower than the other ranks", columns, rows, sortable=True)] if rows else []


def _late(traced: Sequence[tuple[Run, Traced]]) -> list[Table]:
    """Return the table of what made steps late: the greatest excess on their critical paths."""
    rows = []
    for run, trace in traced:
        paths = CriticalPaths(trace.timeline, trace.blocks)
        every = -(-len(trace.steps) // PATHS)
        positions = range(0, len(trace.steps), every)
        late: dict[tuple[int, Kind, str], list[float]] = {}
        for part in (path.late for path in map(paths.find, positions) if path.late):
            late.setdefault((part.rank, part.kind, part.name), []).append(part.excess)
        for (rank, kind, name), excess in sorted(late.items(), key=lambda item: -len(item[1]))[:3]:
            rows.append(
                [
                    run.label,
                    f"rank {rank}",
                    describe_label(kind, name),
                    f"{len(excess)} of {len(positions)}",
                    f"{1e3 * sum(excess) / len(excess):.3g} ms",
                ]
            )
    columns = ["run", "rank", "where", "steps", "mean excess"]
    return [Table(LATE, columns, rows, sortable=True)] if rows else []

"""A trace as text: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from pydtnn.tracing.analysis import (
    Blocks,
    CriticalPaths,
    Labels,
    Path,
    Time,
    compare,
    describe_label,
    efficiency,
    epoch_times,
    find_blocks,
    label,
    layer_times,
    machine,
    operation_times,
    phase_times,
    rates,
    slow_ranks,
    step_durations,
    traffic,
    usage,
    waits,
)
from pydtnn.tracing.analysis.difference import MIN_STEPS
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind
from pydtnn.utils.units import align, quantity

LINE_LENGTH = 100
"""Maximum length of a line, in characters."""

MAX_RANKS = 6
"""Maximum number of ranks with columns of their own."""

MAX_PATHS = 200
"""Maximum number of steps whose critical paths are followed."""


def summarize(timeline: Timeline, *, top: int = 12) -> list[str]:
    """Return the lines of a summary.

    Parameters
    ----------
    timeline : Timeline
    top : int, default 12
        Rows of each table.
    """
    blocks, labels = find_blocks(timeline), label(timeline)
    lines = [*_facts(timeline)]
    parts = [
        _slow(timeline, labels),
        _times("time per phase", phase_times(timeline), top),
        _times("time per layer", layer_times(timeline), top),
        _times("time per operation", operation_times(timeline), top),
        _epochs(timeline, top),
        _usage(timeline, blocks),
        _waits(timeline, blocks, top),
        _traffic(timeline, top),
        _rates(timeline, labels, top),
        _efficiency(timeline, blocks),
        _paths(timeline, blocks, top),
    ]
    for part in parts:
        section = list(part)
        if section:
            lines += ["", *section]
    return lines


def describe_changes(before: Timeline, after: Timeline, *, top: int = 25) -> list[str]:
    """Return the lines of a comparison of two runs, as `compare` does.

    Raises
    ------
    ValueError
        If one of them has no training step.
    """
    changes = compare(before, after)
    first, second = (float(np.median(step_durations(one))) for one in (before, after))
    lines = _wrap(
        f"a step takes {_ms(first)} before ({_count(before)}) and {_ms(second)} after "
        f"({_count(after)}): {second / first - 1:+.1%}"
    )
    heading = ("time per step and rank", "before", "after", "difference", "noise", "")
    table = [heading]
    for one in changes[:top]:
        few = one.noise != one.noise
        clear = "" if one.significant or few else "within the noise"
        noise = f"below {MIN_STEPS} steps" if few else _ms(one.noise)
        difference = f"{1e3 * one.difference:+.3f} ms"
        name = describe_label(one.kind, one.name)
        table.append((name, _ms(one.before), _ms(one.after), difference, noise, clear))
    return [*lines, "", *_table(table, 1), *_rest(len(changes), top)]


def _count(timeline: Timeline) -> str:
    plural = "s" * (timeline.size > 1)
    return f"{len(timeline.steps)} steps, {timeline.size} rank{plural}"


def _facts(timeline: Timeline) -> Iterator[str]:
    hosts = {str(about.get("host", "unknown")) for about in timeline.about}
    steps = timeline.steps
    epochs = np.unique(steps.epochs)
    span = f"epoch {epochs[0]}" if len(epochs) == 1 else f"{len(epochs)} epochs"
    ranks = f"{timeline.size} rank{'s' * (timeline.size > 1)}"
    yield (
        f"{ranks} on {len(hosts)} host{'s' * (len(hosts) > 1)}, {timeline.duration / 1e9:.3f} s: "
        + (f"{len(steps)} steps of {span}" if len(steps) else "no complete step")
        + f", median {_ms(steps.duration / 1e9)}" * bool(len(steps))
    )
    error = max(float(about["clock"].get("error", 0)) for about in timeline.about)
    if timeline.size > 1:
        yield f"clocks agree within {error / 1e3:.1f} us"
    for failure in timeline.about[0].get("failures", []):
        yield from _wrap(failure)
    command = timeline.about[0].get("command")
    if command:
        yield _short(f"command: {command}", LINE_LENGTH)


def _slow(timeline: Timeline, labels: Labels) -> Iterator[str]:
    for one in slow_ranks(timeline, labels)[:5]:
        yield from _wrap(
            f"rank {one.rank} is slow in {describe_label(one.kind, one.name)}: "
            f"{_ms(one.seconds)} per step, {_ms(one.others)} on the other ranks "
            f"({one.share:.0%} of a step)"
        )
        if (one.kind, one.name) == (Kind.PHASE, "data"):
            yield from _loader(timeline, one.rank)


def _loader(timeline: Timeline, slow: int) -> Iterator[str]:
    """Compare the loader of a rank that waits for its batches with those of the others."""
    medians = [
        [time.median for time in phase_times(timeline, rank) if time.kind == Kind.LOAD]
        for rank in range(timeline.size)
    ]
    if all(medians):
        others = float(np.median([one[0] for one in medians[:slow] + medians[slow + 1 :]]))
        yield f"  its loader needs {_ms(medians[slow][0])} per batch, the others {_ms(others)}"


def _times(title: str, times: Sequence[Time], top: int) -> Iterator[str]:
    if not times:
        return
    sends = any(time.nbytes for time in times)
    heading = (title, "", "calls", "total", "own", "median", "share", *["sent"] * sends)
    rows: list[tuple[str, ...]] = [heading]
    for time in times[:top]:
        row = (time.name, time.kind.name.lower(), f"{time.calls:,}")
        numbers = (f"{time.total:.3f} s", f"{time.own:.3f} s", _ms(time.median))
        sent = [quantity(time.nbytes, 1024, "B")] * sends
        rows.append((*row, *numbers, f"{time.share:.1%}", *sent))
    yield from _table(rows, 2)
    yield from _rest(len(times), top)


def _epochs(timeline: Timeline, top: int) -> Iterator[str]:
    """Time of the phases of each epoch; beyond `MAX_RANKS` ranks the extremes only."""
    times = [time for time in epoch_times(timeline) if time.epoch >= 0]
    if not times:
        return
    many = timeline.size > MAX_RANKS
    ranks = ("minimum", "median", "maximum") if many else _names(timeline)
    rows: list[tuple[str, ...]] = [("epoch", "phase", "calls", *ranks)]
    for time in times[: 3 * top]:
        values = np.quantile(time.seconds, (0, 0.5, 1)) if many else time.seconds
        numbers = [f"{value:.3f} s" for value in values]
        rows.append((str(time.epoch), time.name, f"{time.calls:,}", *numbers))
    yield from _table(rows, 2)
    yield from _rest(len(times), 3 * top)


def _usage(timeline: Timeline, blocks: Blocks) -> Iterator[str]:
    found = usage(timeline, blocks)
    if not found:
        return
    rows: list[tuple[str, ...]] = [
        ("time of the steps", "compute", "communication", "waiting", "total", "overlapped")
    ]
    shown = found
    if len(found) > 4 * MAX_RANKS:  # the extremes
        by_waiting = sorted(found, key=lambda one: one.waiting)
        shown = by_waiting[: 2 * MAX_RANKS] + by_waiting[-2 * MAX_RANKS :]
    for one in shown:
        parts = (one.compute, one.communication, one.waiting)
        cells = [f"{part:.3f} s {part / (one.total or 1):4.0%}" for part in parts]
        both = (f"{one.total:.3f} s", f"{one.overlapped:.3f} s")
        rows.append((f"rank {one.rank}", *cells, *both))
    yield from _table(rows, 1)
    if len(shown) < len(found):
        yield f"... and {len(found) - len(shown)} ranks that wait neither most nor least"


def _waits(timeline: Timeline, blocks: Blocks, top: int) -> Iterator[str]:
    found = waits(timeline, blocks)
    pairs = [(found[r, q], r, q) for r, q in np.argwhere(found > 0).tolist()]
    if not pairs:
        return
    rows: list[tuple[str, ...]] = [("waiting", "", "total")]
    for seconds, rank, peer in sorted(pairs, reverse=True)[:top]:
        rows.append((f"rank {rank}", f"for rank {peer}", f"{seconds:.3f} s"))
    yield from _table(rows, 2)
    yield from _rest(len(pairs), top)


def _traffic(timeline: Timeline, top: int) -> Iterator[str]:
    nbytes, count = traffic(timeline)
    pairs = [(nbytes[r, q], r, q) for r, q in np.argwhere(count > 0).tolist()]
    if not pairs:
        return
    rows: list[tuple[str, ...]] = [("messages", "", "number", "sent")]
    for total, rank, peer in sorted(pairs, reverse=True)[:top]:
        sent = quantity(float(total), 1024, "B")
        rows.append((f"rank {rank}", f"to rank {peer}", f"{count[rank, peer]:,}", sent))
    yield from _table(rows, 2)
    yield from _rest(len(pairs), top)


def _rates(timeline: Timeline, labels: Labels, top: int) -> Iterator[str]:
    found = sorted(rates(timeline, labels), key=lambda rate: -rate.seconds)
    if not found:
        return
    limits = machine(timeline)
    peaks = ("of peak", "of copy", "limit") if limits else ()
    first, second = [*peaks[:1]], [*peaks[1:]]
    rows: list[tuple[str, ...]] = [("layer", "", "per step", "GFLOP/s", *first, "GB/s", *second)]
    for rate in found[:top]:
        row = [rate.name, rate.kind.name.lower(), _ms(rate.seconds)]
        row.append(f"{rate.flops_per_second / 1e9:.2f}")
        if limits:
            row.append(f"{rate.flops_per_second / limits.flops_per_second:.0%}")
        row.append(f"{rate.bytes_per_second / 1e9:.2f}")
        if limits:
            row.append(f"{rate.bytes_per_second / limits.bytes_per_second:.0%}")
            row.append(f"{limits.limit(rate) / rate.seconds:.0%}")
        rows.append(tuple(row))
    yield from _table(rows, 2)
    yield from _rest(len(found), top)
    if limits:
        if any(rate.flops_per_second > limits.flops_per_second for rate in found[:top]):
            yield "above 100 % of peak: Winograd's algorithm saves operations of the definition"
        yield (
            f"the machine, with the threads of a rank: {limits.flops_per_second / 1e9:.1f} GFLOP/s "
            f"(matrix product), {limits.bytes_per_second / 1e9:.1f} GB/s (copy)"
        )


def _efficiency(timeline: Timeline, blocks: Blocks) -> Iterator[str]:
    found = efficiency(timeline, blocks)
    if found is None or timeline.size == 1:
        return
    rows = [
        ("parallel efficiency", f"{found.parallel:.1%}", "useful time over runtime"),
        ("  load balance", f"{found.load_balance:.1%}", "mean over maximum of useful time"),
        ("  serialisation", f"{found.serialisation:.1%}", "dependencies between ranks"),
        ("  transfer", f"{found.transfer:.1%}", "time of messages and calls"),
    ]
    yield from ("  ".join((name.ljust(20), value.rjust(6), what)) for name, value, what in rows)
    yield (
        f"runtime {found.runtime:.3f} s, on an ideal network {found.ideal_runtime:.3f} s, "
        f"useful at most {found.useful.max():.3f} s"
    )


def _paths(timeline: Timeline, blocks: Blocks, top: int) -> Iterator[str]:
    steps = len(timeline.steps)
    if not steps or timeline.size == 1:
        return
    finder = CriticalPaths(timeline, blocks)
    chosen = np.unique(np.linspace(0, steps - 1, min(steps, MAX_PATHS)).astype(int))
    paths = [finder.find(position) for position in chosen.tolist()]
    totals: dict[tuple[int, str], float] = {}
    for path in paths:
        for part in path.parts:
            key = part.rank, describe_label(part.kind, part.name)
            totals[key] = totals.get(key, 0.0) + part.seconds
    whole = sum(path.seconds for path in paths) or 1
    rows: list[tuple[str, ...]] = [("critical path", "", "per step", "share")]
    for (rank, what), total in sorted(totals.items(), key=lambda item: -item[1])[:top]:
        row = (what, f"rank {rank}", _ms(total / len(paths)), f"{total / whole:.1%}")
        rows.append(row)
    yield from _table(rows, 2)
    yield from _rest(len(totals), top)
    yield from _late(paths)


def _late(paths: Sequence[Path]) -> Iterator[str]:
    """Describe what made steps late most often."""
    causes: dict[tuple[int, str], list[float]] = {}
    for path in paths:
        if path.late is not None:
            key = path.late.rank, describe_label(path.late.kind, path.late.name)
            causes.setdefault(key, []).append(path.late.excess)
    for (rank, what), excess in sorted(causes.items(), key=lambda item: -sum(item[1]))[:3]:
        yield from _wrap(
            f"{len(excess)} of {len(paths)} steps were late because of rank {rank}, {what}: "
            f"{_ms(float(np.mean(excess)))} beyond the other ranks"
        )


def _names(timeline: Timeline) -> list[str]:
    return [f"rank {rank}" for rank in range(timeline.size)]


def _rest(count: int, top: int) -> Iterator[str]:
    if count > top:
        yield f"... and {count - top} more (--top {count})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _wrap(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, LINE_LENGTH, subsequent_indent="  ")


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table; names in the first column are shortened to fit."""
    excess = max(map(len, align(rows, left))) - LINE_LENGTH
    width = max(len(row[0]) for row in rows) - max(excess, 0)
    return align([(_short(row[0], width), *row[1:]) for row in rows], left)


def _short(name: str, width: int) -> str:
    """Return a name without its middle if it is too long."""
    half = (width - 3) // 2
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"

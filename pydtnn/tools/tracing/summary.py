"""A trace as text: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from pydtnn.tools.tracing import analysis
from pydtnn.tools.tracing.analysis import Blocks, Labels, Path, Time, describe_label
from pydtnn.tools.tracing.analysis.difference import MIN_STEPS
from pydtnn.tools.tracing.timeline import Timeline
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
    blocks, labels = analysis.find_blocks(timeline), analysis.label(timeline)
    lines = [*_facts(timeline)]
    parts = [
        _slow(timeline, labels),
        _times("time per phase", analysis.phase_times(timeline), top),
        _times("time per layer", analysis.layer_times(timeline), top),
        _times("time per operation", analysis.operation_times(timeline), top),
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
    changes = analysis.compare(before, after)
    first, second = (float(np.median(analysis.step_durations(one))) for one in (before, after))
    lines = _wrap(
        f"a step takes {_ms(first)} before ({_count(before)}) and {_ms(second)} after "
        f"({_count(after)}): {second / first - 1:+.1%}"
    )
    heading = ("time per step and rank", "before", "after", "difference", "noise", "")
    rows = []
    for one in changes[:top]:
        few = one.noise != one.noise
        clear = "" if one.significant or few else "within the noise"
        noise = f"below {MIN_STEPS} steps" if few else _ms(one.noise)
        difference = f"{1e3 * one.difference:+.3f} ms"
        name = describe_label(one.kind, one.name)
        rows.append((name, _ms(one.before), _ms(one.after), difference, noise, clear))
    return [*lines, "", *_first(heading, rows, len(changes), top, left=1)]


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
    for one in analysis.slow_ranks(timeline, labels)[:5]:
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
        [time.median for time in analysis.phase_times(timeline, rank) if time.kind == Kind.LOAD]
        for rank in range(timeline.size)
    ]
    if all(medians):
        others = float(np.median([one[0] for one in medians[:slow] + medians[slow + 1 :]]))
        yield f"  its loader needs {_ms(medians[slow][0])} per batch, the others {_ms(others)}"


def _times(title: str, times: Sequence[Time], top: int) -> Iterator[str]:
    sends = any(time.nbytes for time in times)
    heading = (title, "", "calls", "total", "own", "median", "share", *["sent"] * sends)
    rows = []
    for time in times[:top]:
        row = (time.name, time.kind.name.lower(), f"{time.calls:,}")
        numbers = (f"{time.total:.3f} s", f"{time.own:.3f} s", _ms(time.median))
        sent = [quantity(time.nbytes, 1024, "B")] * sends
        rows.append((*row, *numbers, f"{time.share:.1%}", *sent))
    return _first(heading, rows, len(times), top)


def _usage(timeline: Timeline, blocks: Blocks) -> Iterator[str]:
    found = analysis.usage(timeline, blocks)
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
    found = analysis.waits(timeline, blocks)
    pairs = _largest(found, found)
    rows = [
        (f"rank {rank}", f"for rank {peer}", f"{seconds:.3f} s")
        for seconds, rank, peer in pairs[:top]
    ]
    return _first(("waiting", "", "total"), rows, len(pairs), top)


def _traffic(timeline: Timeline, top: int) -> Iterator[str]:
    nbytes, count = analysis.traffic(timeline)
    pairs = _largest(nbytes, count)
    rows = []
    for total, rank, peer in pairs[:top]:
        sent = quantity(float(total), 1024, "B")
        rows.append((f"rank {rank}", f"to rank {peer}", f"{count[rank, peer]:,}", sent))
    return _first(("messages", "", "number", "sent"), rows, len(pairs), top)


def _largest(values: np.ndarray, counts: np.ndarray) -> list[tuple[float, int, int]]:
    """Return value, rank and peer of the pairs of ranks with a count, the largest value first."""
    pairs = [(values[r, q], r, q) for r, q in np.argwhere(counts > 0).tolist()]
    return sorted(pairs, reverse=True)


def _rates(timeline: Timeline, labels: Labels, top: int) -> Iterator[str]:
    found = sorted(analysis.rates(timeline, labels), key=lambda rate: -rate.seconds)
    limits = analysis.machine(timeline)
    peaks = ("of peak", "of copy", "limit") if limits else ()
    first, second = [*peaks[:1]], [*peaks[1:]]
    heading = ("layer", "", "per step", "GFLOP/s", *first, "GB/s", *second)
    rows = []
    for rate in found[:top]:
        row = [rate.name, rate.kind.name.lower(), _ms(rate.seconds)]
        row.append(f"{rate.flops_per_second / 1e9:.2f}")
        if limits:
            row.append(f"{rate.flops_per_second / limits.flops_per_second:.0%}")
        row.append(f"{rate.bytes_per_second / 1e9:.2f}")
        if limits:
            row.append(f"{rate.bytes_per_second / limits.bytes_per_second:.0%}")
            row.append(f"{limits.limit(rate) / rate.seconds:.0%}")
        rows.append(row)
    yield from _first(heading, rows, len(found), top)
    if limits and found:
        if any(rate.flops_per_second > limits.flops_per_second for rate in found[:top]):
            yield "above 100 % of peak: Winograd's algorithm saves operations of the definition"
        yield (
            f"the machine, with the threads of a rank: {limits.flops_per_second / 1e9:.1f} GFLOP/s "
            f"(matrix product), {limits.bytes_per_second / 1e9:.1f} GB/s (copy)"
        )


def _efficiency(timeline: Timeline, blocks: Blocks) -> Iterator[str]:
    found = analysis.efficiency(timeline, blocks)
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
    finder = analysis.CriticalPaths(timeline, blocks)
    chosen = np.unique(np.linspace(0, steps - 1, min(steps, MAX_PATHS)).astype(int))
    paths = [finder.find(position) for position in chosen.tolist()]
    totals: dict[tuple[int, str], float] = {}
    for path in paths:
        for part in path.parts:
            key = part.rank, describe_label(part.kind, part.name)
            totals[key] = totals.get(key, 0.0) + part.seconds
    whole = sum(path.seconds for path in paths) or 1
    rows = []
    for (rank, what), total in sorted(totals.items(), key=lambda item: -item[1])[:top]:
        row = (what, f"rank {rank}", _ms(total / len(paths)), f"{total / whole:.1%}")
        rows.append(row)
    yield from _first(("critical path", "", "per step", "share"), rows, len(totals), top)
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


def _first(
    heading: Sequence[str], rows: Sequence[Sequence[str]], count: int, top: int, left: int = 2
) -> Iterator[str]:
    """Yield the lines of a table of the first `top` of `count` rows, if there are any."""
    if rows:
        yield from _table([heading, *rows], left)
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

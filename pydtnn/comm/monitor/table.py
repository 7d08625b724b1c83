"""The table of ranks: who is late, and what each rank is doing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from pydtnn.comm.monitor.rows import Row

K = TypeVar("K", bound=Hashable)


def late(rows: Sequence[Row]) -> list[Row]:
    """Return the ranks that the others wait for; none if all wait for each other.

    These are ranks that cannot run, otherwise those that do not wait for another rank, otherwise
    those that have made fewer calls in a group than others that wait there.
    """
    stopped = [row for row in rows if row.problem]
    busy = [row for row in rows if not row.waits]
    most: dict[str, int] = {}
    for row in rows:
        most[row.group] = max(row.number, most.get(row.group, 0))
    behind = [row for row in rows if 0 < row.number < most[row.group]]
    found = stopped or busy or behind
    return found if len(found) < len(rows) or stopped else []


def sentence(rows: Sequence[Row]) -> str:
    """Return who is late and what the others wait for, in one sentence.

    Examples
    --------
    >>> rows = [Row(0, "a", waits="barrier"), Row(1, "a", waits="barrier")]
    >>> sentence([*rows, Row(2, "a", doing="in the loader", seconds=41)])
    'rank 2: in the loader since 41 s; ranks 0-1 wait in barrier'
    """
    found = late(rows)
    parts = [f"{names(same)}: {text}" for text, same in _alike(found, _late)]
    others = [row for row in rows if row not in found and row.waits]
    for text, same in _alike(others, lambda row: row.waits):
        parts.append(f"{names(same)} wait{'s' * (len(same) == 1)} in {text}")
    return "; ".join(parts) or "no rank waits for another"


def table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each rank; ranks that do the same share a line."""
    several = len({row.host for row in rows}) > 1
    lines = [("rank", "host", "epoch", "step", "for", "doing")]
    for (text, position, host), same in _alike(rows, lambda row: (_doing(row), _at(row), row.host)):
        seconds = max(row.seconds for row in same)
        numbers = ranges(row.rank for row in same)
        lines.append((numbers, host, *position, f"{seconds:.1f} s", text))
    shown = [line if several else (line[0], *line[2:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in shown
    )
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


def names(rows: Sequence[Row]) -> str:
    """Return "rank 1" or "ranks 0-2, 5"."""
    return f"rank{'s' * (len(rows) > 1)} {ranges(row.rank for row in rows)}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers with runs of consecutive ones in short.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _late(row: Row) -> str:
    doing = ", ".join(filter(None, [row.problem, row.doing, *row.threads]))
    return f"{doing} since {row.seconds:.0f} s"


def _doing(row: Row) -> str:
    waits = ""
    if row.waits:
        peer = "" if row.peer < 0 else f" with rank {row.peer}"
        waits = f"waits in {row.waits}{peer}"
    return ", ".join(filter(None, [row.problem, waits or row.doing, *row.threads]))


def _at(row: Row) -> tuple[str, str]:
    return ("-", "-") if row.epoch < 0 else (str(row.epoch), str(row.step))


def _alike(rows: Iterable[Row], key: Callable[[Row], K]) -> list[tuple[K, list[Row]]]:
    """Group rows by a key, in the order of their first."""
    groups: dict[K, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())

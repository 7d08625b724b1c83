"""Runs as a table: a row for each, sorted and filtered by its columns and options."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydtnn.tools.runs.run import Run, differences
from pydtnn.utils.names import unknown
from pydtnn.utils.tables import csv_of
from pydtnn.utils.units import align, duration

NONE = "\N{EN DASH}"
"""Cell of a value that is missing or not set."""

COLUMNS: dict[str, Callable[[Run], Any]] = {
    "run": lambda run: str(run.folder),
    "model": lambda run: run.configuration.get("model"),
    "data": lambda run: run.configuration.get("dataset"),
    "ranks": lambda run: run.size,
    "epochs": lambda run: run.epochs,
    "planned": lambda run: run.planned,
    "value": lambda run: run.monitored or None,
    "best": lambda run: best[1] if (best := run.best()) else None,
    "best_epoch": lambda run: best[0] if (best := run.best()) else None,
    "rate": lambda run: run.samples_per_second(),
    "seconds": lambda run: run.seconds(),
    "started": lambda run: run.about.get("started"),
    "state": lambda run: run.state,
}
"""Columns by name, with the value of a run; None if it is unknown."""

OPTIONAL = ("started", "ranks", "time", "samples/s", "data", "model")
"""Columns that are left out if the terminal is too narrow, the first ones first."""

MIN_TEXT_COLUMNS = 12
"""Width to which long names are shortened before a column is left out."""

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}

FACTS = ("ranks", "hosts", "threads", "device", "instruction_set", "mesh", "parameters")
"""Entries of run.json that are compared besides options."""


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the values of all columns of each run."""
    return [{name: value(run) for name, value in COLUMNS.items()} for run in runs]


def select_rows(
    runs: Sequence[Run], conditions: Sequence[str], sort: str, reverse: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of the runs that meet all conditions, sorted.

    Parameters
    ----------
    runs : sequence of Run
    conditions : sequence of str
        "NAME=VALUE", or with another of `COMPARISONS`; a name is a column or an option, and a text
        may have wildcards.
    sort : str
        Column, or option, to sort by; runs without a value are last.
    reverse : bool
        Whether the largest value is first.

    Raises
    ------
    ValueError
        If a condition cannot be parsed, or there is no such column or option.
    """
    known = {*COLUMNS}
    for run in runs:
        known |= {*run.configuration, *(run.history[-1] if run.history else ())}
    tests = [read_condition(text, known) for text in conditions]
    sort = _known(sort, known)
    rows = rows_of(runs)
    kept = [
        (_value(run, row, sort), row)
        for run, row in zip(runs, rows, strict=True)
        if all(test(run, row) for test in tests)
    ]
    with_value = [pair for pair in kept if pair[0] is not None]
    numbers = all(isinstance(value, int | float) for value, _ in with_value)
    with_value.sort(key=lambda pair: pair[0] if numbers else _text(pair[0]), reverse=reverse)
    return [row for _, row in (*with_value, *(pair for pair in kept if pair[0] is None))]


def read_condition(text: str, known: Collection[str]) -> Callable[[Run, Mapping[str, Any]], bool]:
    """Return the test that a condition on one of the known names describes, of a run and its row.

    Raises
    ------
    ValueError
    """
    found = re.fullmatch(r"([\w-]+?)(>=|<=|!=|=|>|<)(.*)", text)
    if found is None:
        raise ValueError(
            f"--filter must be a column or an option with a value, such as epochs>=10 or "
            f"model=resnet*, got {text!r}"
        )
    name, sign, given = _known(found[1], known), found[2], found[3]

    def test(run: Run, row: Mapping[str, Any]) -> bool:
        value = _value(run, row, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return COMPARISONS[sign](value, float(given))
            except ValueError:
                return sign == "!="
        if sign in ("=", "!="):
            return fnmatchcase(_text(value), given) == (sign == "=")
        return value is not None and COMPARISONS[sign](_text(value), given)

    return test


def _known(name: str, known: Collection[str]) -> str:
    name = name.replace("-", "_")
    if name not in known:
        raise ValueError(unknown("column or option", name, COLUMNS, known))
    return name


def _value(run: Run, row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, of an option, or of the last epoch."""
    last = run.history[-1] if run.history else {}
    return next((each[name] for each in (row, run.configuration, last) if name in each), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def show(rows: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """Return the lines of a table of the rows, at most `width` columns wide.

    Long names are shortened, and then columns are left out; None is any width.
    """
    judged = {row["value"] for row in rows}
    cells = [_cells(row, judged) for row in rows]
    names = [*cells[0]]
    text = {"run", "model", "data"}
    while True:
        table = [[*names], *([row[name] for name in names] for row in cells)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        excess = sum(widths) + 2 * (len(widths) - 1) - (width or math.inf)
        for position in sorted(range(len(names)), key=lambda i: -widths[i]):
            if excess > 0 and names[position] in text and widths[position] > MIN_TEXT_COLUMNS:
                now = max(MIN_TEXT_COLUMNS, widths[position] - int(excess))
                excess -= widths[position] - now
                for row in table:
                    row[position] = _shorten(row[position], now)
        droppable = [name for name in OPTIONAL if name in names]
        if excess <= 0 or not droppable:
            return align(table, sum(name in text for name in names))
        names.remove(droppable[0])


def _shorten(text: str, width: int) -> str:
    """Return a text without its middle: names of runs differ at their ends."""
    if len(text) <= width:
        return text
    start = (width - 1) // 2
    return f"{text[:start]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - (width - 1 - start) :]}"


def _cells(row: Mapping[str, Any], judged: Collection[str | None]) -> dict[str, str]:
    """Return the cells of a row by title, which has the best value's name if it is the only one."""
    best, rate, seconds = (row[name] for name in ("best", "rate", "seconds"))
    planned = NONE if row["planned"] is None else row["planned"]
    value = NONE if best is None else f"{best:.4f} @ {row['best_epoch']}"
    [name] = judged if len(judged) == 1 else [None]
    cells = {
        "run": row["run"],
        "model": row["model"],
        "data": row["data"],
        "ranks": row["ranks"],
        "epochs": f"{row['epochs']}/{planned}",
        f"best {name}" if name else "best": value if name else f"{row['value'] or ''} {value}",
        "samples/s": None if rate is None else f"{rate:,.0f}",
        "time": None if seconds is None else duration(seconds),
        "started": None if row["started"] is None else str(row["started"])[:16].replace("T", " "),
        "state": row["state"],
    }
    return {title: NONE if cell is None else str(cell) for title, cell in cells.items()}


def to_json(
    rows: Sequence[Mapping[str, Any]], configurations: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return a list with an object for each row: the columns, and the configuration of the run."""
    content = [{**row, "configuration": configurations[row["run"]]} for row in rows]
    return json.dumps(content, indent=1, default=str)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each row, after one with the names of the columns."""
    return csv_of(rows, COLUMNS)


def show_differences(runs: Sequence[Run], width: int | None) -> list[str]:
    """Return the lines of a table of what differs between runs, a column for each run."""
    values = differences(runs)
    facts = {name: [run.about.get(name) for run in runs] for name in FACTS}
    for name in ("pydtnn", "commit"):
        facts[name] = [run.entry("environment").get(name) for run in runs]
    for name, given in facts.items():
        if len({*map(str, given)}) > 1:
            values.setdefault(name, given)
    labels = [Path(run.folder).name for run in runs]
    if len({*labels}) < len(labels):
        labels = [str(run.folder) for run in runs]
    table = [["", *labels]]
    table += [
        [name.replace("_", "-"), *(NONE if value is None else _text(value) for value in each)]
        for name, each in values.items()
    ]
    best = [run.best() for run in runs]
    table.append(["best", *(NONE if found is None else f"{found[1]:.4f}" for found in best)])
    if width is not None:
        names = max(len(row[0]) for row in table)
        each = max(MIN_TEXT_COLUMNS, (width - names) // len(runs) - 2)
        table = [[row[0], *(_shorten(cell, each) for cell in row[1:])] for row in table]
    return align(table, len(table[0]))

"""Tables: the results of runs, their configuration and their environment, with differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.report.curves import VALIDATION, title_of
from pydtnn.report.runs import Run
from pydtnn.report.section import Section, Table

NONE = "\N{EN DASH}"
"""Cell of a value that is missing or not set."""

FEW = 4
"""Maximum number of runs that are columns of the table of results."""

OF_THE_RUN = (
    *("command", "started", "ranks", "hosts", "threads", "device", "instruction_set", "mesh"),
    *("tuning", "parameters", "global_batch_size", "steps_per_epoch", "schedule"),
    "weight_decay",
)
"""Entries of run.json besides configuration and environment."""


def overview(runs: Sequence[Run]) -> Section:
    """Return a table of the results: a row for each run, or a column for each of a few runs."""
    values = dict.fromkeys(name for run in runs for name in run.history[-1] if name != "lr")
    columns = ["run", "model", "data", "ranks", "samples per step", "epochs"]
    columns += [_words(name) for name in values]
    columns += ["samples/s", "time in epochs", "peak memory per rank"]
    rows = [[*_facts(run), *(_number(run, name) for name in values), *_speed(run)] for run in runs]
    if len(runs) <= FEW:
        columns, *rows = (list(cells) for cells in zip(columns, *rows, strict=True))
    text = "Losses and metrics are those of the last epoch."
    return Section("results", "Results", text, tables=[Table("", columns, rows, numbers=True)])


def configuration(runs: Sequence[Run]) -> Section:
    """Return the options, those that differ between the runs first."""
    section = Section("configuration", "Configuration")
    known = [run for run in runs if run.about]
    if not known:
        section.absent = "no run has the file run.json, which python -m pydtnn.train writes"
        return section
    facts = [{name: run.about.get(name) for name in OF_THE_RUN} for run in known]
    options = [{**run.configuration, "output_dir": None} for run in known]
    section.tables = [
        *_tables(known, "Options of the command line", options),
        *_tables(known, "Ranks, batches and model", facts),
    ]
    return section


def environment(runs: Sequence[Run]) -> Section:
    """Return machine and versions."""
    section = Section("environment", "Environment")
    known = [run for run in runs if isinstance(run.about.get("environment"), dict)]
    if not known:
        section.absent = "no run has the file run.json, which python -m pydtnn.train writes"
        return section
    found = [flat(run.about["environment"] | _gpu(run)) for run in known]
    section.tables = _tables(known, "Machine and versions", found)
    return section


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with joined names.

    >>> flat({"cpu": {"cores": 2}, "python": "3.11"})
    {'cpu cores': 2, 'python': '3.11'}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name} ")
        else:
            found[prefix + str(name)] = value
    return found


def show(value: Any) -> str:
    """Return the text of a value of a JSON file.

    >>> show(None), show(True), show([1, "a"]), show({"k": 2})
    ('–', 'yes', '1, a', '{"k": 2}')
    """
    if value in (None, "", {}, []):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tables(runs: Sequence[Run], title: str, values: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table with the values that differ, and a folded one with the others."""
    names = dict.fromkeys(name for each in values for name in each)
    rows = {name: [show(each.get(name)) for each in values] for name in names}
    rows = {name: cells for name, cells in rows.items() if {*cells} != {NONE}}
    differing = {name: cells for name, cells in rows.items() if len({*cells}) > 1}
    equal = {name: cells for name, cells in rows.items() if name not in differing}
    tables = []
    if differing:
        shown = [[_label(name), *cells] for name, cells in differing.items()]
        columns = ["", *(run.label for run in runs)]
        tables.append(Table(f"{title}: differences", columns, shown, [*range(len(shown))]))
    if equal:
        rest = [[_label(name), cells[0]] for name, cells in equal.items()]
        words = f"{title}: equal in all runs" if len(runs) > 1 else title
        tables.append(Table(words, ["", "value"], rest, folded=True))
    return tables


def _label(name: str) -> str:
    return name.replace("_", " ")


def _words(name: str) -> str:
    part = "validation" if name.startswith(VALIDATION) else "training"
    return f"{part} {title_of(name)}"


def _number(run: Run, name: str) -> str:
    value = run.history[-1].get(name)
    return NONE if value is None else f"{value:.4f}"


def _facts(run: Run) -> list[str]:
    size, threads = run.size, run.about.get("threads")
    ranks = NONE if size is None else f"{size} x {_count(threads, 'thread')}" if threads else size
    batch = run.about.get("global_batch_size")
    options = run.configuration
    names = [show(options.get(name)) for name in ("model", "dataset")]
    return [run.label, *names, str(ranks), show(batch), str(len(run.history))]


def _speed(run: Run) -> list[str]:
    rate, totals = run.samples_per_second(), run.totals()
    if rate is None or not totals:
        return [NONE] * 3
    seconds = max(rank["total"] for rank in totals)
    memory = max(rank["peak_memory"] for rank in totals)
    return [f"{rate:,.0f}", duration(seconds), f"{memory / 1e6:,.0f} MB"]


def duration(seconds: float) -> str:
    """Return a duration in the units in which it is read.

    >>> duration(7.04), duration(125), duration(7320)
    ('7.0 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _count(number: Any, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _gpu(run: Run) -> dict[str, Any]:
    found = run.about.get("gpu")
    return {"gpu": found} if isinstance(found, dict) and found else {}

"""Tables: the results of runs, their configuration and their environment, with differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.tools.report.curves import title_of
from pydtnn.tools.report.runs import ABOUT, ENVIRONMENT, RunView
from pydtnn.tools.report.section import Section, Table, section
from pydtnn.tools.runs.run import VALIDATION, better
from pydtnn.utils.units import duration

NONE = "\N{EN DASH}"
"""Cell of a value that is missing or not set."""

SENSE = {"max": "highest", "min": "lowest"}

MAX_COLUMNS = 4
"""Maximum number of runs that are columns of the table of results."""

OF_THE_RUN = (
    *("command", "started", "ranks", "hosts", "threads", "device", "instruction_set", "mesh"),
    *("tuning", "parameters", "global_batch_size", "steps_per_epoch", "schedule"),
    "weight_decay",
)
"""Entries of run.json besides configuration and environment."""


def overview(runs: Sequence[RunView]) -> Section:
    """Return a table of the results: a row for each run, or a column for each of a few runs."""
    values = dict.fromkeys(name for run in runs for name in run.history[-1] if name != "lr")
    swept = [name for name in runs[0].swept if name not in ("model", "dataset")]
    judged = runs[0].monitored
    columns = ["run", "model", "data", *map(_label, swept), "ranks and cores", "samples per step"]
    columns += ["epochs", *(_words(name) for name in values)]
    columns += [f"best {_words(judged)}", "best epoch"] if judged else []
    columns += ["samples/s", "time in epochs", "peak memory per rank"]
    rows = [
        [
            *_facts(run, swept),
            *(_number(run.history[-1].get(name)) for name in values),
            *(_best(run, judged) if judged else []),
            *_speed(run),
        ]
        for run in runs
    ]
    if turned := len(runs) <= MAX_COLUMNS:
        columns, *rows = (list(cells) for cells in zip(columns, *rows, strict=True))
    text = "Losses and metrics are those of the last epoch."
    if judged:
        text += f" The best epoch is that of the {SENSE[better(judged)]} {_words(judged)}."
    table = Table("", columns, rows, numbers=True, sortable=not turned)
    return Section("results", "Results", text, tables=[table])


@section("configuration", "Configuration", ABOUT)
def configuration(result: Section, known: Sequence[tuple[RunView, Mapping[str, Any]]]) -> None:
    """Fill the section with the options, those that differ between the runs first."""
    runs = [run for run, _ in known]
    facts = [{name: about.get(name) for name in OF_THE_RUN} for _, about in known]
    options = [{**run.configuration, "output_dir": None} for run in runs]
    result.tables = [
        *_tables(runs, "Options of the command line", options),
        *_tables(runs, "Ranks, batches and model", facts),
    ]


@section("environment", "Environment", ENVIRONMENT)
def environment(result: Section, known: Sequence[tuple[RunView, Mapping[str, Any]]]) -> None:
    """Fill the section with machine and versions."""
    values = [flat({**machine, "gpu": run.entry("gpu")}) for run, machine in known]
    result.tables = _tables([run for run, _ in known], "Machine and versions", values)


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


def _tables(
    runs: Sequence[RunView], title: str, values: Sequence[Mapping[str, Any]]
) -> list[Table]:
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


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _facts(run: RunView, swept: Sequence[str]) -> list[str]:
    batch = run.about.get("global_batch_size")
    names = [show(run.configuration.get(name)) for name in ("model", "dataset", *swept)]
    return [run.label, *names, run.places(), show(batch), str(len(run.history))]


def _best(run: RunView, name: str) -> list[str]:
    """Return the best value of a run, and its epoch."""
    best = run.best(name)
    return [NONE, NONE] if best is None else [_number(best[1]), str(best[0])]


def _speed(run: RunView) -> list[str]:
    rate, totals = run.samples_per_second(), run.totals()
    if rate is None or not totals:
        return [NONE] * 3
    seconds = max(rank["total"] for rank in totals)
    memory = max(rank["peak_memory"] for rank in totals)
    return [f"{rate:,.0f}", duration(seconds), f"{memory / 1e6:,.0f} MB"]

"""Measured time of a step beside that of the performance model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.tools.report.runs import RunView
from pydtnn.tools.report.scaling import mean_step
from pydtnn.tools.report.section import Section, SectionSource, Table, section


def _numbers(
    entry: Any, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, float] | None:
    """Return the numbers of an entry of run.json, if they are valid."""
    try:
        values = {name: float(entry[name]) for name in names}
        values |= {name: float(entry.get(name, 0.0)) for name in optional}
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    valid = all(0 <= value < math.inf for value in values.values()) and values["seconds"] > 0
    return values if valid else None


def _prediction(run: RunView) -> dict[str, float] | None:
    """Return the prediction in run.json, if it is valid and the steps were measured."""
    values = _numbers(run.about.get("predicted"), PARTS, ("low", "high"))
    return values if run.ranks else None


def _why_unpredicted(runs: Sequence[RunView]) -> str:
    entries = [run.about.get("predicted") for run in runs]
    reasons = [entry.get("reason") for entry in entries if isinstance(entry, dict)]
    return next(
        (str(reason) for reason in reasons if reason), "no run has a prediction in run.json"
    )


TIMES = ("seconds", "low", "high", "compute", "communication", "data", "first")
"""Numbers of the entry "measured" of run.json, in s."""


def _measured(run: RunView) -> dict[str, float]:
    """Return the times of a step in run.json; those of a run that was stopped are means."""
    if values := _numbers(run.about.get("measured"), TIMES):
        return values
    mean = mean_step(run)
    return mean | {"seconds": sum(mean.values())}


def _predicted_table(title: str, run: RunView, own: Mapping[str, float]) -> Table:
    measured = _measured(run)
    total = measured["seconds"]
    rows = [
        [name, f"{1e3 * seconds:.4g} ms", f"{1e3 * prediction:.4g} ms"]
        for name, seconds, prediction in (
            ("time per step", total, own["seconds"]),
            ("compute and update", measured["compute"], own["compute"] + own["update"]),
            ("communication, exposed", measured["communication"], own["communication"]),
            ("waiting for data", measured["data"], own["data"]),
        )
    ]
    if "low" in measured:
        low, high, first = (f"{1e3 * measured[name]:.4g} ms" for name in ("low", "high", "first"))
        ends = [f"{1e3 * own[name]:.4g} ms" for name in ("low", "high")]
        predicted = " to ".join(ends) if own["low"] < own["high"] else ""
        rows.insert(1, ["first and last decile of the steps", f"{low} to {high}", predicted])
        rows.append(["first step, with the choice of algorithms", first, ""])
    rows.append(["accuracy", "", f"{max(1 - abs(own['seconds'] / total - 1), 0):.0%}"])
    grown = max(rank["step_memory"] for rank in run.totals())
    sizes = [f"{size / 1e6:,.0f} MB" if size else "" for size in (grown, own["memory"])]
    rows.append(["memory of a rank, without interpreter and data", *sizes])
    return Table(title, ["", "measured", "predicted"], rows, numbers=True)


PARTS = ("seconds", "compute", "update", "communication", "data", "memory")
"""Numbers of the entry "predicted" of run.json: s per step, and B."""


@section(
    "predicted",
    "Measured and predicted time per step",
    SectionSource(_prediction, _why_unpredicted),
    "Predicted before the first step from the platform, the network and the strategy, or in short "
    "runs from ten steps; measured times are medians over the other steps, and means over ranks.",
)
def predicted(result: Section, known: Sequence[tuple[RunView, dict[str, float]]]) -> None:
    """Fill the section with a table of measured and predicted parts of a step for each run."""
    result.tables = [
        _predicted_table(run.label if len(known) > 1 else "", run, own) for run, own in known
    ]

"""Measured time of a step beside that of the performance model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.report.runs import Run
from pydtnn.report.section import Section, Table

SPENT = ("steps", "communication", "data")
"""Measured times of a rank, see `pydtnn.report.runs.PARTS`."""

PARTS = ("seconds", "compute", "update", "communication", "data", "memory")
"""Numbers of the entry "predicted" of run.json: s per step, and B."""


def predicted(runs: Sequence[Run]) -> Section:
    """Return a table with measured and predicted parts of a step, for each run that has both."""
    section = Section("predicted", "Measured and predicted time per step")
    pairs = [(run, prediction_of(run)) for run in runs]
    known = [(run, own) for run, own in pairs if own is not None and measured_of(run)]
    if not known:
        reasons = [str(about["reason"]) for run in runs if (about := _entry(run)).get("reason")]
        section.absent = reasons[0] if reasons else "no run has a prediction in run.json"
        return section
    section.tables = [_table(run, own, len(runs) > 1) for run, own in known]
    section.text = (
        "Predicted before the first step from the platform, the network and the strategy; measured "
        "times are means over all steps and ranks."
    )
    return section


def prediction_of(run: Run) -> dict[str, float] | None:
    """Return the prediction in run.json; None if there is none that is valid."""
    entry = _entry(run)
    try:
        values = {name: float(entry[name]) for name in PARTS}
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    valid = all(0 <= value < math.inf for value in values.values()) and values["seconds"] > 0
    return values if valid else None


def measured_of(run: Run) -> dict[str, float]:
    """Return the measured parts of a step in s, means over the ranks; empty if there are none."""
    steps = sum(epoch.steps for epoch in run.intervals)
    totals = run.totals()
    if not steps or not totals:
        return {}
    spent = {part: sum(rank[part] for rank in totals) / len(totals) / steps for part in SPENT}
    return {
        "seconds": spent["steps"] + spent["data"],
        "compute": spent["steps"] - spent["communication"],
        "communication": spent["communication"],
        "data": spent["data"],
    }


def _table(run: Run, own: Mapping[str, float], several: bool) -> Table:
    measured = measured_of(run)
    rows = []
    for name, part, value in (
        ("time per step", "seconds", own["seconds"]),
        ("compute and update", "compute", own["compute"] + own["update"]),
        ("communication, exposed", "communication", own["communication"]),
        ("waiting for data", "data", own["data"]),
    ):
        rows.append([name, f"{1e3 * measured[part]:.4g} ms", f"{1e3 * value:.4g} ms"])
    rows.append(["predicted of measured", "", f"{own['seconds'] / measured['seconds']:.2f}"])
    grown = max(rank["step_memory"] for rank in run.totals())
    sizes = [f"{size / 1e6:,.0f} MB" if size else "" for size in (grown, own["memory"])]
    rows.append(["memory of a rank, without interpreter and data", *sizes])
    return Table(run.label if several else "", ["", "measured", "predicted"], rows, numbers=True)


def _entry(run: Run) -> Mapping[str, Any]:
    entry = run.about.get("predicted")
    return entry if isinstance(entry, dict) else {}

"""The results of an evaluation as a tidy table: one observation a row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.evaluation.plan import Cell, Plan

RUNS = "runs.jsonl"
"""A line for each run that has ended, in the order in which they ran."""

TABLE = "observations.csv"

RESPONSES = (
    *(("start_up", "s"), ("memory", "B")),
    *(("bytes", "B"), ("messages", ""), ("link_bytes", "B")),  # of a rank, or a host, in a step
)
"""What is measured once a run, and units."""

COLUMNS = ("repetition", "framework", "network", "ranks", "response", "step", "value", "unit")


def append(folder: Path, cell: Cell, found: dict[str, Any]) -> None:
    """Add a run to the results."""
    path = folder / RUNS
    cut = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut + json.dumps(cell._asdict() | found) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Return all runs; a line that was cut off is left out.

    Raises
    ------
    ValueError
        If there are none, or if some were written by an earlier version.
    """
    path = folder / RUNS
    if not path.exists():
        raise ValueError(f"{folder}: expected {RUNS}, got none; run the plan first")
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    names = {"accuracy", "before", "after", *(name for name, _ in RESPONSES)}
    for run in found:
        if "error" not in run and (missing := sorted(names - run.keys())):
            raise ValueError(
                f"{path}: a run has no {missing[0]!r}: an earlier version wrote it; run the plan "
                "again in another folder"
            )
    return found


def time_to(run: Mapping[str, Any], target: float) -> float | None:
    """Return the time in s of the steps until the accuracy after an epoch is at least `target`."""
    for epoch, accuracy in enumerate(run["accuracy"], start=1):
        if accuracy >= target:
            return sum(run["times"][: epoch * run["epoch"]])
    return None


def rows(runs: list[dict[str, Any]], plan: Plan) -> Iterator[tuple[Any, ...]]:
    """Yield the observations of all runs that did not fail."""
    for run in runs:
        if "error" in run:
            continue
        own = tuple(run[name] for name in Cell._fields)
        for step, (loss, seconds) in enumerate(zip(run["losses"], run["times"], strict=True)):
            yield *own, "loss", step, loss, ""
            if step >= plan.warm_up:
                yield *own, "time of a step", step, seconds, "s"
                rate = run["ranks"] * plan.batch_of(run["ranks"]) / seconds
                yield *own, "throughput", step, rate, "samples/s"
        for epoch, accuracy in enumerate(run["accuracy"], start=1):
            yield *own, "accuracy", epoch, accuracy, ""
        if (seconds := time_to(run, plan.target)) is not None:
            yield *own, "time to accuracy", "", seconds, "s"
        if (joules := energy(run)) is not None:
            yield *own, "energy", "", joules, "J"
        for name, unit in RESPONSES:
            if run[name] is not None:
                yield *own, name, "", run[name], unit


def energy(run: Mapping[str, Any]) -> float | None:
    """Return the energy in J of the processor during a run, or None if it cannot be read."""
    before, after = run["before"]["joules"], run["after"]["joules"]
    return None if before is None or after is None or after < before else after - before


def write(folder: Path, runs: list[dict[str, Any]], plan: Plan) -> Path:
    """Write the table."""
    path = folder / TABLE
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(runs, plan))
    return path

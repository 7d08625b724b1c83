"""Traces as comma-separated values: one row per record."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.observer import Kind

COLUMNS = (
    "rank",
    "thread",
    "kind",
    "name",
    "epoch",
    "step",
    "start",
    "duration",
    "bytes",
    "peer",
    "tag",
    "bucket",
    "memory",
)
"""Columns; times are in s of rank 0's clock, counted from the first record."""


def write_table(timeline: Timeline, path: Path) -> None:
    """Write a trace as comma-separated values, by start. Raises OSError if that is impossible."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(timeline))
    write_file("trace export", path, text.getvalue().encode())


def rows(timeline: Timeline) -> list[tuple[object, ...]]:
    """Return the rows of all activities and messages; fields that do not apply are empty."""
    found = []
    for row in timeline.activities:
        thread = timeline.lanes[row["rank"]][row["lane"]]
        first = (int(row["rank"]), thread, Kind(int(row["kind"])).name.lower())
        last = (*map(_known, (row["bucket"], row["memory"])),)
        middle = (*_common(timeline, row, row["name"]), int(row["nbytes"]), "", "")
        found.append((*first, *middle, *last))
    messages = timeline.messages
    lonely = messages.unmatched_sent, messages.unmatched_received
    for kind, near, far, parts in (
        (Kind.SENT, "source", "target", (messages.sent, lonely[0])),
        (Kind.RECEIVED, "target", "source", (messages.received, lonely[1])),
    ):
        for row in np.concatenate(parts):
            rank = int(row[near])
            first = (rank, timeline.lanes[rank][row["lane"]], kind.name.lower())
            middle = (*_common(timeline, row, row["group"]), int(row["nbytes"]))
            found.append((*first, *middle, _known(row[far]), int(row["tag"]), "", ""))
    return sorted(found, key=lambda row: (float(str(row[6])), row[0]))


def _common(timeline: Timeline, row: np.void, name: int) -> tuple[object, ...]:
    """Return name, epoch, step, start and duration."""
    times = (int(row["start"]), int(row["stop"] - row["start"]))
    steps = (_known(row["epoch"]), _known(row["step"]))
    return (timeline.names[name], *steps, *(f"{time / 1e9:.9f}" for time in times))


def _known(value: int) -> int | str:
    return int(value) if value >= 0 else ""

"""Traces as comma-separated values: one row per record."""

from __future__ import annotations

import csv
import io
from operator import itemgetter
from pathlib import Path

import numpy as np

from pydtnn.tools.tracing.timeline import ActivityRecord, Message, Timeline, message_rows
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
    found: list[tuple[int, int, tuple[object, ...]]] = []
    for row in timeline.rows():
        rest = (row.nbytes, "", "", _known(row.bucket), _known(row.memory))
        where = (row.rank, timeline.lanes[row.rank][row.lane], Kind(row.kind).name.lower())
        cells = (*where, timeline.names[row.name], *_times(row), *rest)
        found.append((row.start, row.rank, cells))
    messages = timeline.messages
    for kind, parts in (
        (Kind.SENT, (messages.sent, messages.unmatched_sent)),
        (Kind.RECEIVED, (messages.received, messages.unmatched_received)),
    ):
        for message in message_rows(np.concatenate(parts)):
            rank, peer = message.source, message.target
            if kind == Kind.RECEIVED:
                rank, peer = peer, rank
            where = (rank, timeline.lanes[rank][message.lane], kind.name.lower())
            ends = (message.nbytes, _known(peer), message.tag, "", "")
            cells = (*where, timeline.names[message.group], *_times(message), *ends)
            found.append((message.start, rank, cells))
    return [cells for *_, cells in sorted(found, key=itemgetter(0, 1))]


def _times(row: ActivityRecord | Message) -> tuple[object, ...]:
    """Return epoch, step, start and duration."""
    times = (row.start, row.stop - row.start)
    return (_known(row.epoch), _known(row.step), *(f"{time / 1e9:.9f}" for time in times))


def _known(value: int) -> int | str:
    return value if value >= 0 else ""

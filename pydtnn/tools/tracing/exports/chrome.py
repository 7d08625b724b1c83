"""Chrome's trace events as JSON, which https://ui.perfetto.dev and chrome://tracing open.

Ranks are processes; threads are threads, numbered from 1. The format is that of the document Trace
Event Format: complete events ("X"), flows for messages ("s", "f"), their time in flight as
asynchronous events ("b", "e"), counters ("C") and names ("M").
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.tools.tracing.timeline import ActivityRecord, Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.observer import Kind


def threads(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, number of the thread) of all threads."""
    return [(rank, lane) for rank, lanes in enumerate(timeline.lanes) for lane in range(len(lanes))]


def thread_name(timeline: Timeline, rank: int, lane: int) -> str:
    """Return the name of a thread, unique among all ranks."""
    return f"rank {rank} {timeline.lanes[rank][lane]}"


def transitions(
    timeline: Timeline, rank: int, lane: int
) -> Iterator[tuple[int, ActivityRecord, bool]]:
    """Yield the beginnings and ends of a thread's activities, which are properly nested.

    Yields
    ------
    int
        Time in ns, ascending.
    Activity
    bool
        Whether the activity begins.
    """
    open_rows: list[ActivityRecord] = []
    for row in timeline.rows(timeline.select(rank=rank, lane=lane)):
        while open_rows and open_rows[-1].depth >= row.depth:
            last = open_rows.pop()
            yield last.stop, last, False
        open_rows.append(row)
        yield row.start, row, True
    while open_rows:
        last = open_rows.pop()
        yield last.stop, last, False


MESSAGES_THREAD = 1000
"""Number of the thread that messages in flight are shown as, beyond those of threads."""

Event = dict[str, Any]


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write a trace as JSON, compressed if the path ends with ``.gz``.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events(timeline))
    about = {str(rank): about for rank, about in enumerate(timeline.about)}
    other = json.dumps({"ranks": about}, default=str)
    text = f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'
    data = text.encode()
    write_file("trace export", path, gzip.compress(data, 6) if path.suffix == ".gz" else data)


def events(timeline: Timeline) -> Iterator[Event]:
    """Yield the trace events. Times are in us, with a resolution of 1 ns."""
    yield from _names(timeline)
    yield from _activities(timeline)
    yield from _messages(timeline)
    yield from _counters(timeline)


def _names(timeline: Timeline) -> Iterator[Event]:
    for rank, about in enumerate(timeline.about):
        name = f"rank {rank} ({about.get('host', 'unknown host')})"
        yield _meta("process_name", rank, 0, name=name)
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for rank, lane in threads(timeline):
        yield _meta("thread_name", rank, lane, name=timeline.lanes[rank][lane])
        yield _meta("thread_sort_index", rank, lane, sort_index=lane)


def _meta(what: str, rank: int, lane: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane + 1, "args": args}


def _activities(timeline: Timeline) -> Iterator[Event]:
    for row in timeline.rows():
        args = {"epoch": row.epoch, "step": row.step, "bucket": row.bucket}
        args = {field: value for field, value in args.items() if value >= 0}
        if row.nbytes:
            args["bytes"] = row.nbytes
        yield {
            "ph": "X",
            "name": timeline.title(row.kind, row.name),
            "cat": Kind(row.kind).name.lower(),
            "pid": row.rank,
            "tid": row.lane + 1,
            "ts": row.start / 1000,
            "dur": (row.stop - row.start) / 1000,
            "args": args,
        }


def _messages(timeline: Timeline) -> Iterator[Event]:
    for number, (sent, received) in enumerate(timeline.messages.pairs()):
        source, target = sent.source, sent.target
        args = {"bytes": sent.nbytes, "tag": sent.tag, "group": timeline.names[sent.group]}
        flow: Event = {"cat": "message", "name": "message", "id": number}
        # A flow is attached to the slice that encloses it, which ends when the message arrives.
        arrived = max(received.start, received.stop - 1)
        begin: Event = {"pid": source, "tid": sent.lane + 1, "ts": sent.start / 1000}
        end: Event = {"pid": target, "tid": received.lane + 1, "ts": arrived / 1000}
        yield {"ph": "s", **flow, **begin, "args": args}
        yield {"ph": "f", "bp": "e", **flow, **end}
        for what, side, rank, peer in (
            ("send to", sent, source, target),
            ("receive from", received, target, source),
        ):
            span: Event = {"cat": what, "name": f"{what} {peer}", "id": f"{what} {number}"}
            span |= {"pid": rank, "tid": MESSAGES_THREAD}
            yield {"ph": "b", **span, "ts": side.start / 1000, "args": args}
            yield {"ph": "e", **span, "ts": side.stop / 1000}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.size):
        rows = timeline.activities[timeline.select(rank=rank)]
        known = rows[rows["memory"] >= 0]
        known = known[np.argsort(known["stop"], kind="stable")]
        known = known[np.diff(known["memory"], prepend=-1) != 0]
        sending = rows[rows["nbytes"] > 0]
        sending = sending[np.argsort(sending["start"], kind="stable")]
        for name, times, values in (
            ("memory in use", known["stop"], known["memory"]),
            ("bytes sent", sending["start"], np.cumsum(sending["nbytes"])),
        ):
            for time, value in zip(times.tolist(), values.tolist(), strict=True):
                where: Event = {"pid": rank, "tid": 1, "ts": time / 1000}
                yield {"ph": "C", "name": name, **where, "args": {"B": value}}

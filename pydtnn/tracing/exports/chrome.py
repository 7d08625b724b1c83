"""Chrome's trace events as JSON, which https://ui.perfetto.dev and chrome://tracing open.

Ranks are processes; threads are threads, numbered from 1. The format is that of the document Trace
Event Format: complete events ("X"), flows for messages ("s", "f"), their time in flight as
asynchronous events ("b", "e"), counters ("C") and names ("M").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.tracing.exports.nesting import threads
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.observer import Kind

MESSAGES = 1000
"""Number of the thread that messages in flight are shown as, beyond those of threads."""

Event = dict[str, Any]


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write a trace as JSON. Raises OSError if the file cannot be written."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events(timeline))
    about = {str(rank): about for rank, about in enumerate(timeline.about)}
    other = json.dumps({"ranks": about}, default=str)
    text = f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{lines}\n]}}\n'
    write_file("trace export", path, text.encode())


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
    for row in timeline.activities:
        kind = Kind(int(row["kind"]))
        args = {field: int(row[field]) for field in ("epoch", "step", "bucket") if row[field] >= 0}
        if row["nbytes"]:
            args["bytes"] = int(row["nbytes"])
        yield {
            "ph": "X",
            "name": title(timeline, row),
            "cat": kind.name.lower(),
            "pid": int(row["rank"]),
            "tid": int(row["lane"]) + 1,
            "ts": int(row["start"]) / 1000,
            "dur": int(row["stop"] - row["start"]) / 1000,
            "args": args,
        }


def title(timeline: Timeline, row: np.void) -> str:
    """Return the name of an activity, with its direction if it is a layer."""
    name, kind = timeline.names[row["name"]], Kind(int(row["kind"]))
    return f"{name} ({kind.name.lower()})" if kind in (Kind.FORWARD, Kind.BACKWARD) else name


def _messages(timeline: Timeline) -> Iterator[Event]:
    both = zip(timeline.messages.sent, timeline.messages.received, strict=True)
    for number, (sent, received) in enumerate(both):
        group = timeline.names[sent["group"]]
        source, target = int(sent["source"]), int(sent["target"])
        args = {"bytes": int(sent["nbytes"]), "tag": int(sent["tag"]), "group": group}
        flow: Event = {"cat": "message", "name": "message", "id": number}
        # A flow is attached to the slice that encloses it, which ends when the message arrives.
        arrived = max(int(received["start"]), int(received["stop"]) - 1)
        lanes = int(sent["lane"]), int(received["lane"])
        begin: Event = {"pid": source, "tid": lanes[0] + 1, "ts": int(sent["start"]) / 1000}
        end: Event = {"pid": target, "tid": lanes[1] + 1, "ts": arrived / 1000}
        yield {"ph": "s", **flow, **begin, "args": args}
        yield {"ph": "f", "bp": "e", **flow, **end}
        for what, side, rank in (("send to", sent, source), ("receive from", received, target)):
            peer = target if rank == source else source
            span: Event = {"cat": what, "name": f"{what} {peer}", "id": f"{what} {number}"}
            span |= {"pid": rank, "tid": MESSAGES}
            yield {"ph": "b", **span, "ts": int(side["start"]) / 1000, "args": args}
            yield {"ph": "e", **span, "ts": int(side["stop"]) / 1000}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.size):
        rows = timeline.activities[timeline.select(rank=rank)]
        known = rows[rows["memory"] >= 0]
        known = known[np.argsort(known["stop"], kind="stable")]
        changed = np.diff(known["memory"], prepend=-1) != 0
        for row in known[changed]:
            yield _counter("memory in use", rank, row["stop"], "B", row["memory"])
        sending = rows[rows["nbytes"] > 0]
        sending = sending[np.argsort(sending["start"], kind="stable")]
        for row, total in zip(sending, np.cumsum(sending["nbytes"]), strict=True):
            yield _counter("bytes sent", rank, row["start"], "B", total)


def _counter(name: str, rank: int, time: int, unit: str, value: int) -> Event:
    args = {unit: int(value)}
    return {"ph": "C", "name": name, "pid": rank, "tid": 1, "ts": int(time) / 1000, "args": args}

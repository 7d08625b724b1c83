"""Traces in the form of PyTorch's profiler (Kineto), which Holistic Trace Analysis reads.

A file per rank. That tool finds compute and communication among the kernels of a GPU. A rank that
has none is shown as if it had one: what its main thread computes in the steps are kernels of stream
`COMPUTE`, its communication those of stream `COMMUNICATION`, and the time that it waits for other
ranks is empty. What is in flight while it computes is on both streams. Each kernel has a launch,
without duration, in the thread. Times are in us: the tool rounds fractions towards the middle of
each event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydtnn.tools.tracing.analysis.states import State, States, find_states
from pydtnn.tools.tracing.exports.chrome import Event
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.files import check_new, write_file
from pydtnn.utils.observer import Kind

COMPUTE, COMMUNICATION = 7, 20
"""Numbers of the streams."""

FIRST_LAUNCH = 1 << 16
"""The smallest correlation: the tool keeps positions of events in the type that holds these."""

CATEGORIES = {Kind.PHASE: "user_annotation", Kind.LOAD: "user_annotation"}
"""Categories of activities; of the others, "cpu_op"."""

STREAMS = {
    COMPUTE: (State.COMPUTE, State.OVERLAP),
    COMMUNICATION: (State.OVERLAP, State.COMMUNICATION),
}
"""The states in which each stream has kernels."""


def write_kineto(timeline: Timeline, folder: Path) -> None:
    """Write ``rank-0000.json``, ``rank-0001.json``, ... into a new folder.

    Raises
    ------
    ValueError
        If there is no step that all ranks have recorded.
    OSError
        If the folder exists or cannot be created.
    """
    if not len(timeline.steps):
        raise ValueError(
            "trace export: expected training steps that all ranks have recorded, got none; use "
            "--trace without --trace-steps, or with several steps"
        )
    check_new("trace export", folder)
    for rank, states in enumerate(find_states(timeline)):
        machine = timeline.about[rank].get("machine", {})
        about = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": machine.get("cpu", "CPU")}],
            "distributedInfo": {"backend": "mpi", "rank": rank, "world_size": timeline.size},
            "displayTimeUnit": "ms",
        }
        lines = ",\n".join(map(json.dumps, _events(timeline, rank, states)))
        text = f'{json.dumps(about)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'
        write_file("trace export", folder / f"rank-{rank:04}.json", text.encode())


def _events(timeline: Timeline, rank: int, states: States) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    steps = timeline.steps
    for number, ends in enumerate(zip(steps.start[:, rank], steps.stop[:, rank], strict=True)):
        yield _event(f"ProfilerStep#{number}", "user_annotation", rank, 1, *ends)
    for row in timeline.rows(timeline.select(rank=rank)):
        category = CATEGORIES.get(Kind(row.kind), "cpu_op")
        name = timeline.title(row.kind, row.name)
        yield _event(name, category, rank, row.lane + 1, row.start, row.stop)
    correlation = FIRST_LAUNCH
    for stream, chosen in STREAMS.items():
        for state, activity, start, stop in states.runs(chosen):
            if round(start / 1000) == round(stop / 1000):
                continue
            launch = _event("cudaLaunchKernel", "cuda_runtime", rank, 1, start, start)
            yield launch | {"args": {"correlation": correlation}}
            name = _kernel(timeline, stream, state, activity)
            args = {"stream": stream, "device": 0, "correlation": correlation}
            yield _event(name, "kernel", 0, stream, start, stop) | {"args": args}
            correlation += 1


def _kernel(timeline: Timeline, stream: int, state: int, activity: int) -> str:
    """Return the name of a kernel, by which the tool distinguishes communication."""
    row = timeline.activities[activity] if activity >= 0 else None
    if stream == COMPUTE:
        return "step" if row is None else timeline.title(int(row["kind"]), int(row["name"]))
    if state == State.OVERLAP or row is None:
        return "ncclKernel_in_flight"
    return f"ncclKernel_{timeline.names[row['name']]}"


def _event(name: str, category: str, pid: int, tid: int, start: int, stop: int) -> Event:
    times = (round(int(start) / 1000), round(int(stop) / 1000))
    event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    return event | {"ts": times[0], "dur": times[1] - times[0]}

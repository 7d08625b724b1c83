"""Traces for Paraver: records in a ``.prv`` file, names in ``.pcf`` and ``.row``, two views.

Each rank is a task and each thread a thread of it. States are what a thread does; events the
innermost phase, layer, kernel, operation of the communicator and work of the loader, with the value
0 at their ends, and bytes, buckets and memory; communications are messages.

References
----------
Paraver: Parallel Program Visualization and Analysis Tool, Tracefile Description, Barcelona
Supercomputing Center.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from pydtnn.tracing.analysis.blocks import STARTING
from pydtnn.tracing.exports.nesting import threads, transitions
from pydtnn.tracing.exports.paraver_names import (
    BUCKET,
    BYTES,
    EPOCH,
    MEMORY,
    STEP,
    TYPES,
    State,
    layers_view,
    names_file,
    rows_file,
    states_view,
)
from pydtnn.tracing.timeline import Activity, Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.observer import Kind

Line = tuple[int, int, str]
"""Time in ns, type of the record and the record."""


def write_paraver(timeline: Timeline, path: Path) -> None:
    """Write a trace and the files beside it. Raises OSError if a file cannot be written.

    Parameters
    ----------
    timeline : Timeline
    path : Path
        Of the ``.prv`` file. The others have its name with another suffix; the views are
        ``NAME-states.cfg`` and ``NAME-layers.cfg``.
    """
    objects = Objects(timeline)
    records = _Records(timeline, objects)
    lines = sorted(records.lines(), key=itemgetter(0, 1))
    header = objects.header(datetime.now())
    files = {
        path: "".join([header, *(f"{line}\n" for _, _, line in lines)]),
        path.with_suffix(".pcf"): names_file(records.values),
        path.with_suffix(".row"): rows_file(timeline, objects.cpus, objects.hosts),
        path.with_name(f"{path.stem}-states.cfg"): states_view(),
        path.with_name(f"{path.stem}-layers.cfg"): layers_view(),
    }
    for name, text in files.items():
        write_file("trace export", name, text.encode())


@dataclass
class Objects:
    """The processes and resources of a trace, as Paraver numbers them: from 1.

    Each thread has a CPU of its own, as traces do not contain on which one it ran.
    """

    timeline: Timeline
    hosts: list[str] = field(init=False)
    cpus: dict[tuple[int, int], int] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = list(dict.fromkeys(map(self.host, range(self.timeline.size))))
        by_host = sorted(threads(self.timeline), key=lambda one: self.node(one[0]))
        self.cpus = {thread: i + 1 for i, thread in enumerate(by_host)}

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return str(self.timeline.about[rank].get("host", "unknown"))

    def node(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self.hosts.index(self.host(rank)) + 1

    def name(self, rank: int, lane: int) -> str:
        """Return CPU, application, task and thread of a thread."""
        return f"{self.cpus[rank, lane]}:1:{rank + 1}:{lane + 1}"

    def header(self, date: datetime) -> str:
        """Return the first line of the ``.prv`` file."""
        counts = [0] * len(self.hosts)
        for rank, lanes in enumerate(self.timeline.lanes):
            counts[self.node(rank) - 1] += len(lanes)
        nodes = ",".join(map(str, counts))
        tasks = ",".join(
            f"{len(lanes)}:{self.node(rank)}" for rank, lanes in enumerate(self.timeline.lanes)
        )
        return (
            f"#Paraver ({date:%d/%m/%y at %H:%M}):{self.timeline.duration}_ns:"
            f"{len(self.hosts)}({nodes}):1:{self.timeline.size}({tasks})\n"
        )


class _Records:
    """The records of a trace, and the values of the types of events."""

    def __init__(self, timeline: Timeline, objects: Objects) -> None:
        self.timeline, self.objects = timeline, objects
        self.values: dict[int, dict[str, int]] = {}

    def lines(self) -> Iterator[Line]:
        for rank, lane in threads(self.timeline):
            where = self.objects.name(rank, lane)
            yield from self._states(where, rank, lane)
            yield from self._events(where, rank, lane)
        yield from self._communications()

    def _states(self, where: str, rank: int, lane: int) -> Iterator[Line]:
        """States from the start to the end of the trace, without gaps."""
        open_states, last = [State.IDLE], 0
        for time, row, begins in transitions(self.timeline, rank, lane):
            before = open_states[-1]
            if begins:
                open_states.append(self._state(row, before))
            else:
                open_states.pop()
            if open_states[-1] != before and time > last:
                yield last, 1, f"1:{where}:{last}:{time}:{before.value}"
                last = time
        if last < self.timeline.duration:
            end = self.timeline.duration
            yield last, 1, f"1:{where}:{last}:{end}:{open_states[-1].value}"

    def _state(self, row: Activity, outer: State) -> State:
        name = self.timeline.names[row.name]
        if outer not in (State.IDLE, State.RUNNING, State.INPUT):
            return outer
        if row.kind == Kind.WAIT:
            return State.WAITING
        if row.kind == Kind.CALL:
            return State.POSTING if name in STARTING else State.COMMUNICATION
        if row.kind == Kind.PHASE and name == "data":
            return State.INPUT
        return State.RUNNING if outer == State.IDLE else outer

    def _events(self, where: str, rank: int, lane: int) -> Iterator[Line]:
        """Return the events of a thread: for each time, the last value of each type."""
        values: dict[int, int] = {}
        before = 0
        open_values: dict[int, list[int]] = {}
        for time, row, begins in transitions(self.timeline, rank, lane):
            if time > before and values:
                yield before, 2, _event(where, before, values)
                values = {}
            before = time
            kind, name = Kind(row.kind), self.timeline.names[row.name]
            code = TYPES[kind][0]
            stack = open_values.setdefault(code, [0])
            if begins:
                stack.append(self._value(code, name))
            else:
                stack.pop()
            values[code] = stack[-1]
            if kind == Kind.PHASE and name == "step":
                values[EPOCH] = row.epoch + 1 if begins else 0
                values[STEP] = row.step + 1 if begins else 0
            if begins and row.nbytes:
                values[BYTES] = values.get(BYTES, 0) + row.nbytes
            if row.bucket >= 0:
                values[BUCKET] = row.bucket + 1 if begins else 0
            if not begins and row.memory >= 0:
                values[MEMORY] = row.memory
        if values:
            yield before, 2, _event(where, before, values)

    def _value(self, code: int, name: str) -> int:
        values = self.values.setdefault(code, {})
        return values.setdefault(name, len(values) + 1)

    def _communications(self) -> Iterator[Line]:
        """A message is sent when it is posted, and received when it is known to be complete."""
        for sent, received in self.timeline.messages.pairs():
            source = self.objects.name(sent.source, sent.lane)
            target = self.objects.name(received.target, received.lane)
            start = sent.start
            yield (
                start,
                3,
                f"3:{source}:{start}:{start}:{target}:{received.start}:{received.stop}:"
                f"{sent.nbytes}:{sent.tag}",
            )


def _event(where: str, time: int, values: dict[int, int]) -> str:
    pairs = ":".join(f"{code}:{value}" for code, value in values.items())
    return f"2:{where}:{time}:{pairs}"

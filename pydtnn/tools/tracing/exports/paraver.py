"""Traces for Paraver: records in a ``.prv`` file, names in ``.pcf`` and ``.row``.

Each rank is a task and each thread a thread of it. States are what a thread does; events the
innermost phase, layer, kernel, operation of the communicator and work of the loader, with the value
0 at their ends, and bytes, buckets and memory; communications are messages.

References
----------
Paraver: Parallel Program Visualization and Analysis Tool, Tracefile Description, Barcelona
Supercomputing Center.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from operator import itemgetter
from pathlib import Path

from pydtnn.tools.tracing.analysis.blocks import STARTING
from pydtnn.tools.tracing.exports.chrome import thread_name, threads, transitions
from pydtnn.tools.tracing.timeline import ActivityRecord, Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.observer import Kind


class ParaverState(IntEnum):
    """States of threads, with the numbers that Paraver's own views use."""

    IDLE = 0
    RUNNING = 1
    WAITING = 8
    POSTING = 10
    INPUT = 12
    COMMUNICATION = 13


STATES = {
    ParaverState.IDLE: ("Idle", (117, 195, 255)),
    ParaverState.RUNNING: ("Running", (0, 0, 255)),
    ParaverState.WAITING: ("Waiting for messages", (235, 0, 0)),
    ParaverState.POSTING: ("Starting messages", (255, 144, 26)),
    ParaverState.INPUT: ("Waiting for the next batch", (255, 255, 170)),
    ParaverState.COMMUNICATION: ("Collective and blocking communication", (219, 147, 112)),
}
"""Name and colour (red, green, blue) of each state."""

TYPES = {
    Kind.PHASE: (91000001, "Phase"),
    Kind.FORWARD: (91000002, "Layer, forward"),
    Kind.BACKWARD: (91000003, "Layer, backward"),
    Kind.KERNEL: (91000004, "Kernel"),
    Kind.CALL: (91000005, "Call of the communicator"),
    Kind.WAIT: (91000006, "Wait for messages"),
    Kind.LOAD: (91000007, "Work of the loader"),
}
"""Number and label of the type of events of each kind of activity."""

EPOCH, STEP, BYTES, BUCKET, MEMORY = 91000011, 91000012, 91000013, 91000014, 91000015

NUMBERS = {
    EPOCH: "Epoch, plus 1",
    STEP: "Step within the epoch, plus 1",
    BYTES: "Bytes sent by a call (B)",
    BUCKET: "Bucket, plus 1",
    MEMORY: "Memory in use (B)",
}
"""Types of events whose values are numbers."""

OPTIONS = """DEFAULT_OPTIONS

LEVEL               THREAD
UNITS               NANOSEC
LOOK_BACK           100
SPEED               1
FLAG_ICONS          ENABLED
NUM_OF_STATE_COLORS 1000
YMAX_SCALE          37


DEFAULT_SEMANTIC

THREAD_FUNC          State As Is

"""


def names_file(values: Mapping[int, Mapping[str, int]]) -> str:
    """Return the ``.pcf`` file: names of states, types of events and their values.

    Parameters
    ----------
    values : mapping
        For each type of events, the value of each name.
    """
    lines = ["STATES", *(f"{state.value}    {name}" for state, (name, _) in STATES.items())]
    lines += ["", "", "STATES_COLOR"]
    for state, (_, color) in STATES.items():
        lines.append(f"{state.value}    {{{','.join(map(str, color))}}}")
    for code, label in TYPES.values():
        lines += ["", "", "EVENT_TYPE", f"0    {code}    {label}", "VALUES", "0      End"]
        lines += [f"{value}      {name}" for name, value in values.get(code, {}).items()]
    for code, label in NUMBERS.items():
        lines += ["", "", "EVENT_TYPE", f"0    {code}    {label}"]
    return OPTIONS + "\n".join(lines) + "\n"


def rows_file(timeline: Timeline, cpus: Mapping[tuple[int, int], int], hosts: list[str]) -> str:
    """Return the ``.row`` file: names of CPUs, hosts, ranks and threads.

    Parameters
    ----------
    timeline : Timeline
    cpus : mapping
        Number of the CPU of each (rank, thread).
    hosts : list of str
    """
    threads = [thread_name(timeline, *thread) for thread in sorted(cpus)]
    levels = {
        "CPU": [
            f"CPU of {thread_name(timeline, *one)}" for one in sorted(cpus, key=cpus.__getitem__)
        ],
        "NODE": hosts,
        "TASK": [f"rank {rank}" for rank in range(timeline.size)],
        "THREAD": threads,
    }
    blocks = [
        "\n".join([f"LEVEL {level} SIZE {len(names)}", *names]) for level, names in levels.items()
    ]
    return "\n\n".join(blocks) + "\n"


Line = tuple[int, int, str]
"""Time in ns, type of the record and the record."""


def write_paraver(timeline: Timeline, path: Path) -> None:
    """Write a trace and the files beside it. Raises OSError if a file cannot be written.

    Parameters
    ----------
    timeline : Timeline
    path : Path
        Of the ``.prv`` file. The others have its name with another suffix.
    """
    objects = Objects(timeline)
    records = _Records(timeline, objects)
    lines = sorted(records.lines(), key=itemgetter(0, 1))
    header = objects.header(datetime.now())
    files = {
        path: "".join([header, *(f"{line}\n" for _, _, line in lines)]),
        path.with_suffix(".pcf"): names_file(records.values),
        path.with_suffix(".row"): rows_file(timeline, objects.cpus, objects.hosts),
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
        open_states, last = [ParaverState.IDLE], 0
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

    def _state(self, row: ActivityRecord, outer: ParaverState) -> ParaverState:
        name = self.timeline.names[row.name]
        if outer not in (ParaverState.IDLE, ParaverState.RUNNING, ParaverState.INPUT):
            return outer
        if row.kind == Kind.WAIT:
            return ParaverState.WAITING
        if row.kind == Kind.CALL:
            return ParaverState.POSTING if name in STARTING else ParaverState.COMMUNICATION
        if row.kind == Kind.PHASE and name == "data":
            return ParaverState.INPUT
        return ParaverState.RUNNING if outer == ParaverState.IDLE else outer

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

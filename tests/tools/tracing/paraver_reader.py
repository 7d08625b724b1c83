"""A strict reader of Paraver's traces."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HEADER = re.compile(
    r"#Paraver \(\d\d/\d\d/\d\d at \d\d:\d\d\):(\d+)_ns:(\d+)\(([\d,]+)\):1:(\d+)\(([\d:,]+)\)"
)


@dataclass
class Paraver:
    """What a trace contains; threads are pairs of task and thread, from 1."""

    duration: int = 0
    nodes: int = 0
    threads: set[tuple[int, int]] = field(default_factory=set)
    states: list[tuple[int, ...]] = field(default_factory=list)  # task, thread, begin, end, state
    events: list[tuple[int, ...]] = field(default_factory=list)  # task, thread, time, type, value
    messages: list[tuple[int, ...]] = field(default_factory=list)
    types: dict[int, str] = field(default_factory=dict)
    values: dict[int, dict[int, str]] = field(default_factory=dict)


def read_paraver(path: Path) -> Paraver:
    """Read a trace; AssertionError where a file is not as described."""
    trace = Paraver()
    state_names = read_names(trace, path.with_suffix(".pcf").read_text())
    first, *lines = path.read_text().splitlines()
    found = HEADER.fullmatch(first)
    assert found, f"header {first}"
    trace.duration, trace.nodes = int(found[1]), int(found[2])
    cpus = [int(number) for number in found[3].split(",")]
    tasks = [[int(number) for number in task.split(":")] for task in found[5].split(",")]
    assert (len(cpus), len(tasks)) == (trace.nodes, int(found[4]))
    for task, (threads, node) in enumerate(tasks, 1):
        assert 1 <= node <= trace.nodes
        trace.threads |= {(task, thread) for thread in range(1, threads + 1)}
    sizes = re.findall(r"LEVEL (\w+) SIZE (\d+)", path.with_suffix(".row").read_text())
    levels = {"CPU": sum(cpus), "NODE": trace.nodes, "TASK": len(tasks)}
    assert {name: int(n) for name, n in sizes} == {**levels, "THREAD": len(trace.threads)}
    before = 0
    for line in lines:
        kind, cpu, application, task, thread, *rest = (int(word) for word in line.split(":"))
        assert 1 <= cpu <= sum(cpus)
        assert (application, (task, thread) in trace.threads) == (1, True)
        assert before <= rest[0] <= trace.duration, f"{line}: times must ascend"
        before = rest[0]
        if kind == 1:
            begin, end, state = rest
            assert begin < end <= trace.duration
            assert state in state_names
            trace.states.append((task, thread, begin, end, state))
        elif kind == 2:
            pairs = [*zip(rest[1::2], rest[2::2], strict=True)]
            assert len(dict(pairs)) == len(pairs) > 0, "a type twice at the same time"
            for code, value in pairs:
                assert code in trace.types
                assert code not in trace.values or value in trace.values[code], (code, value)
                trace.events.append((task, thread, rest[0], code, value))
        else:
            posted, sent, _, _, target, other, waited, received, *more = rest
            assert (target, other) in trace.threads - {(task, thread)}
            assert posted <= sent <= received <= trace.duration
            assert 0 <= waited <= received
            trace.messages.append((task, target, sent, received, *more))
    for own in trace.threads:  # its states cover the trace without gaps
        spans = [state[2:4] for state in trace.states if state[:2] == own]
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == trace.duration
    return trace


def read_names(trace: Paraver, text: str) -> dict[int, str]:
    """Read the names of types and values; return those of states."""
    section, types = "", []
    states: dict[int, str] = {}
    for line in text.splitlines():
        number, _, name = line.partition(" ")
        if not number.isdecimal():
            section = number or section
            types = [] if number == "EVENT_TYPE" else types
            trace.values |= {code: {} for code in types if number == "VALUES"}
        elif section == "STATES":
            states[int(number)] = name
        elif section == "EVENT_TYPE":
            code, name = name.split(maxsplit=1)
            trace.types[int(code)] = name
            types.append(int(code))
        elif section == "VALUES":
            for code in types:
                assert int(number) not in trace.values[code]
                trace.values[code][int(number)] = name.strip()
    return states

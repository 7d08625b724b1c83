"""A strict reader of Paraver's traces: everything that the format's description demands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HEADER = re.compile(
    r"#Paraver \(\d\d/\d\d/\d\d at \d\d:\d\d\):(\d+)_ns:(\d+)\(([\d,]+)\):1:(\d+)\(([\d:,]+)\)"
)


@dataclass
class Paraver:
    """What a trace contains."""

    duration: int = 0
    cpus: int = 0
    nodes: int = 0
    threads: dict[tuple[int, int], int] = field(default_factory=dict)  # node of (task, thread)
    states: list[tuple[int, ...]] = field(default_factory=list)  # task, thread, begin, end, state
    events: list[tuple[int, ...]] = field(default_factory=list)  # task, thread, time, type, value
    messages: list[tuple[int, ...]] = field(default_factory=list)
    state_names: dict[int, str] = field(default_factory=dict)
    types: dict[int, str] = field(default_factory=dict)
    values: dict[int, dict[int, str]] = field(default_factory=dict)
    rows: dict[str, list[str]] = field(default_factory=dict)


def read_paraver(path: Path) -> Paraver:
    """Read a trace; AssertionError where a file is not as described."""
    trace = Paraver()
    read_names(trace, path.with_suffix(".pcf").read_text())
    read_rows(trace, path.with_suffix(".row").read_text())
    first, *lines = path.read_text().splitlines()
    found = HEADER.fullmatch(first)
    assert found, f"header {first}"
    trace.duration, trace.nodes = int(found[1]), int(found[2])
    per_node = [int(number) for number in found[3].split(",")]
    assert len(per_node) == trace.nodes
    trace.cpus = sum(per_node)
    tasks = [[int(number) for number in task.split(":")] for task in found[5].split(",")]
    assert len(tasks) == int(found[4])
    for number, (threads, node) in enumerate(tasks, 1):
        assert 1 <= node <= trace.nodes
        trace.threads |= {(number, thread): node for thread in range(1, threads + 1)}
    assert len(trace.rows["CPU"]) == trace.cpus
    assert len(trace.rows["NODE"]) == trace.nodes
    assert len(trace.rows["TASK"]) == len(tasks)
    assert len(trace.rows["THREAD"]) == len(trace.threads)
    before = 0
    for line in lines:
        kind, *rest = (int(word) for word in line.split(":"))
        time = {1: read_state, 2: read_events, 3: read_message}[kind](trace, rest)
        assert before <= time, f"{line}: times must ascend"
        before = time
    check_states(trace)
    return trace


def read_thread(trace: Paraver, cpu: int, application: int, task: int, thread: int) -> None:
    assert 1 <= cpu <= trace.cpus
    assert application == 1
    assert (task, thread) in trace.threads


def read_state(trace: Paraver, numbers: list[int]) -> int:
    where, (begin, end, state) = numbers[:4], numbers[4:]
    read_thread(trace, *where)
    assert 0 <= begin < end <= trace.duration
    assert state in trace.state_names
    trace.states.append((*where[2:], begin, end, state))
    return begin


def read_events(trace: Paraver, numbers: list[int]) -> int:
    where, time, pairs = numbers[:4], numbers[4], numbers[5:]
    read_thread(trace, *where)
    assert 0 <= time <= trace.duration
    assert pairs
    assert len(pairs) % 2 == 0
    assert len({*pairs[::2]}) == len(pairs) // 2, "a type twice at the same time"
    for code, value in zip(pairs[::2], pairs[1::2], strict=True):
        assert code in trace.types
        assert code not in trace.values or value in trace.values[code], (code, value)
        trace.events.append((*where[2:], time, code, value))
    return time


def read_message(trace: Paraver, numbers: list[int]) -> int:
    assert len(numbers) == 14
    source, sent, target, received = numbers[:4], numbers[4:6], numbers[6:10], numbers[10:12]
    read_thread(trace, *source)
    read_thread(trace, *target)
    assert source[2:] != target[2:]
    assert 0 <= sent[0] <= sent[1] <= received[1] <= trace.duration
    assert 0 <= received[0] <= received[1]
    trace.messages.append((source[2], target[2], sent[1], received[1], *numbers[12:]))
    return sent[0]


def check_states(trace: Paraver) -> None:
    """The states of a thread cover the trace without gaps."""
    for thread in trace.threads:
        own = [state[2:4] for state in trace.states if state[:2] == thread]
        assert own[0][0] == 0
        assert own[-1][1] == trace.duration
        assert [begin for begin, _ in own[1:]] == [end for _, end in own[:-1]]


def read_names(trace: Paraver, text: str) -> None:
    section, types = "", []
    for line in text.splitlines():
        words = line.split(maxsplit=2)
        if not words:
            continue
        if words[0] in ("DEFAULT_OPTIONS", "DEFAULT_SEMANTIC", "STATES", "STATES_COLOR"):
            section = words[0]
        elif words[0] == "EVENT_TYPE":
            section, types = words[0], []
        elif words[0] == "VALUES":
            assert types, "values without a type"
            section = words[0]
            trace.values |= {code: {} for code in types}
        elif section == "STATES":
            number, name = line.split(maxsplit=1)
            assert int(number) not in trace.state_names
            trace.state_names[int(number)] = name
        elif section == "STATES_COLOR":
            color = re.fullmatch(r"(\d+) +\{(\d+),(\d+),(\d+)\}", line)
            assert color, line
            assert int(color[1]) in trace.state_names
            assert all(int(part) < 256 for part in color.groups()[1:])
        elif section == "EVENT_TYPE":
            assert int(words[1]) not in trace.types
            trace.types[int(words[1])] = words[2]
            types.append(int(words[1]))
        elif section == "VALUES":
            number, name = line.split(maxsplit=1)
            for code in types:
                assert int(number) not in trace.values[code]
                trace.values[code][int(number)] = name


def read_rows(trace: Paraver, text: str) -> None:
    lines = iter(text.splitlines())
    for line in lines:
        if line:
            found = re.fullmatch(r"LEVEL (CPU|NODE|TASK|THREAD) SIZE (\d+)", line)
            assert found, line
            trace.rows[found[1]] = [next(lines) for _ in range(int(found[2]))]


def read_view(path: Path) -> dict[str, str]:
    """Read a view with one window: value by key."""
    first, *lines = path.read_text().splitlines()
    assert first == "#ParaverCFG"
    assert "ConfigFile.NumWindows: 1" in lines
    pairs = [line.partition(" ") for line in lines if line.startswith("window_")]
    found: dict[str, str] = {}
    for key, _, value in pairs:
        name = " ".join([key, value.split()[0]]) if key == "window_filter_module" else key
        assert name not in found, f"{name} twice"
        found[name] = value
    for key in ("window_selected_functions", "window_compose_functions"):
        inside = re.fullmatch(r"\{ (\d+), \{ (.*) \} \}", found[key])
        assert inside, found[key]
        assert len(re.findall(r"\{\w+, [^{}]+\}", inside[2])) == int(inside[1])
    return found

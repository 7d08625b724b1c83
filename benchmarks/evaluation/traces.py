"""Traced steps of all frameworks side by side: what each rank does, on one clock and one page.

The last steps of a run are recorded: by the profiler of the framework, and of pydtnn by its traces.
The profilers' files contain events of threads in Chrome's format, which PyTorch's Kineto, JAX and
the adapters of the others write. The innermost events of the threads that compute are computation,
those of a sum are communication. A rank communicates while a sum is in progress and nothing is
computed; before the last rank has begun this sum, it waits. All other time of a step is
computation, that of Python included, as in the summary of pydtnn's traces
(`pydtnn.tools.tracing.analysis.states`).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.pages import beginning, table
from benchmarks.evaluation.frameworks import FRAMEWORKS
from benchmarks.evaluation.plan import Cell, Plan
from pydtnn.tools.tracing import load_timeline
from pydtnn.tools.tracing.analysis.states import State, States, count_open, find_states
from pydtnn.utils.files import write_file

PAGE = "traces.html"

COLUMNS = 600
"""Of a picture; each has the state that lasts longest in it."""

COLORS = {
    State.COMPUTE: ("#3b6fb6", "computes"),
    State.OVERLAP: ("#5aa469", "computes while a sum is in progress"),
    State.COMMUNICATION: ("#e08a2e", "communicates"),
    State.WAITING: ("#d9d4cc", "waits for the last rank"),
}

HEADS = ("framework", "ms of a step", *(f"{name}, ms" for _, name in COLORS.values()))

STYLE = """<style>.rank{display:flex;align-items:center;gap:.6em;overflow:visible}
.rank span{flex:0 0 5em;font-size:.8em}.rank svg{flex:1;height:1.1em;min-width:0;margin-bottom:1px}
.key span{display:inline-block;margin-right:1.2em}.key i{display:inline-block;width:1em;height:1em;
vertical-align:-.1em;margin-right:.4em}
h3{margin:1em 0 .2em;font-size:1em}.rank+div:not(.rank){margin-top:1em}</style>"""


class Rule(NamedTuple):
    """How events of a profiler are read: patterns of names."""

    threads: str  # that compute; empty: the thread that calls the steps
    sums: str


RULES = {
    "torch_ddp": Rule("", r"^gloo:all_?reduce"),
    "torch_fsdp": Rule("", r"^gloo:"),
    "deepspeed": Rule("", r"^gloo:"),
    "torchft": Rule("", r"^gloo:all_?reduce"),
    "jax": Rule(r"^tf_XLA", r"^all-reduce"),
    "keras": Rule(r"^tf_Compute", r"CollectiveReduce|^Loop$"),
    "tensorflow": Rule(r"^tf_Compute", r"CollectiveReduce|^Loop$"),
    "horovod": Rule(r"^tf_Compute", "^$"),  # sums are in its timeline
    "horovod_torch": Rule("", "^$"),
    "mxnet": Rule(r"^\d", r"^KVStore"),
    "paddle": Rule(r"\(C\+\+\)$", r"^Global_GradNodeAccumulation"),  # contain sums, without a name
    "pydtnn_uji": Rule("", r"^sum$"),
    "chainermn": Rule("", r"^sum$"),
}
"""Of the frameworks whose profiler is read, besides pydtnn."""


IGNORED = re.compile(r"^\$|\(wait for completion\)")
"""Names of events of no interest: lines of Python, and waits for other threads, in JAX."""


STEP = r"step(\[|$)"
"""Name of a step's event; Paddle adds its duration."""


class Profile(NamedTuple):
    """Intervals of a rank, ``(n, 2)`` in ns of the machine's clock: steps, computation, sums."""

    steps: np.ndarray
    busy: np.ndarray
    sums: np.ndarray


def read_profile(path: Path, rule: Rule, begun: Sequence[int]) -> Profile:
    """Read the events of a rank.

    Parameters
    ----------
    path : Path
        A file of Chrome's format, times in us.
    rule : Rule
    begun : sequence of int
        When the steps began by the machine's clock, in ns: the profilers have other origins.
    """
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    timed = [e for e in events if e.get("ph") == "X" and not IGNORED.search(e["name"])]
    marks = sorted((e for e in timed if re.match(STEP, e["name"])), key=lambda e: e["ts"])
    origin = float(np.median([ns - 1e3 * e["ts"] for ns, e in zip(begun, marks, strict=True)]))

    def times(chosen: Sequence[Mapping[str, Any]]) -> np.ndarray:
        found = [(e["ts"], e["ts"] + e["dur"]) for e in chosen]
        return np.rint(origin + 1e3 * np.array(found).reshape(-1, 2)).astype("i8")

    is_sum = [bool(re.search(rule.sums, e["name"])) for e in timed]
    own = {e["tid"] for e in marks}
    if rule.threads:
        own = {tid for tid, name in named.items() if re.search(rule.threads, name)}
    others = [e for e, it in zip(timed, is_sum, strict=True) if not it and e["tid"] in own]
    sums = times([e for e, it in zip(timed, is_sum, strict=True) if it])
    if (timeline := path.with_name("timeline.json")).exists():
        sums = _read_timeline(timeline)
    return Profile(times(marks), times([*_innermost(others)]), sums[np.argsort(sums[:, 0])])


def _read_timeline(path: Path) -> np.ndarray:
    """Read from Horovod's timeline when the sum of each tensor was in progress on all ranks."""
    first, *events = json.loads(path.read_text())
    begun: dict[int, int] = {}
    found = []
    for event in events:
        if event.get("name") == "MPI_ALLREDUCE":
            begun[event["pid"]] = event["ts"]
        elif event["pid"] in begun:
            found.append((begun.pop(event["pid"]), event["ts"]))
    origin = first["args"]["start_time_since_epoch_in_micros"]
    return 1000 * (origin + np.array(found, "i8").reshape(-1, 2))


def _innermost(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the events that contain no other one of their thread."""
    ordered = sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    for event, after in zip(ordered, [*ordered[1:], None], strict=True):
        contains = after and after["tid"] == event["tid"]
        if contains and after["ts"] < event["ts"] + event["dur"]:
            continue
        if not re.match(STEP, event["name"]):
            yield event


def states_of(profiles: Sequence[Profile]) -> list[States]:
    """Return the states of all ranks; the n-th sum of a rank is that of the others."""
    same = len({len(one.sums) for one in profiles}) == 1
    entered = np.max([one.sums[:, 0] for one in profiles], axis=0) if same else None
    found = []
    for steps, busy, sums in profiles:
        start, stop = sums.T
        last = start if entered is None else np.minimum(entered, stop)
        times = np.unique(np.concatenate([steps, busy, sums], axis=None))
        times = np.unique(np.append(times, last))
        computing, in_flight = count_open(times, *busy.T) > 0, count_open(times, start, stop)
        state = np.full(max(len(times) - 1, 0), State.COMPUTE.value)
        state[(in_flight > 0) & computing] = State.OVERLAP
        state[(in_flight > 0) & ~computing] = State.COMMUNICATION
        alone = (in_flight > 0) & (count_open(times, start, last) == in_flight)
        state[alone & ~computing] = State.WAITING
        state[count_open(times, *steps.T) == 0] = State.OUTSIDE
        found.append(States(times, state))
    return found


class Traced(NamedTuple):
    """The traced steps of a run: ``(steps, 2, ranks)`` starts and stops, and states, in ns."""

    steps: np.ndarray
    states: list[States]

    @property
    def duration(self) -> np.ndarray:
        """From the first rank's start of each step to the last one's end, in ns."""
        return self.steps[:, 1].max(axis=1) - self.steps[:, 0].min(axis=1)

    def shares(self) -> np.ndarray:
        """Return the time in each `State` in a step, in s: the mean of all ranks."""
        return np.mean([one.seconds for one in self.states], axis=0) / len(self.steps)

    def picture(self, until: float) -> list[str]:
        """Return a bar of each rank: the step of median duration, until a time in ns."""
        step = int(np.argsort(self.duration)[len(self.steps) // 2])
        first, last = self.steps[step, 0].min(), self.steps[step, 1].max()
        edges = first + np.linspace(0, until, COLUMNS + 1)
        return [_bar(one, edges, last) for one in self.states]


def _bar(states: States, edges: np.ndarray, last: int) -> str:
    lengths = np.diff(states.times)
    spent = []
    for state in State:
        until = np.append(0, np.cumsum(lengths * (states.state == state)))
        spent.append(np.diff(np.interp(np.minimum(edges, last), states.times, until)))
    longest = np.where(np.sum(spent, axis=0) > 0, np.argmax(spent, axis=0), 0)
    begins = np.flatnonzero(np.append(True, np.diff(longest)))
    parts = [
        f'<rect x="{begin}" width="{end - begin}" height="1" fill="{COLORS[State(own)][0]}"/>'
        for begin, end in zip(begins, [*begins[1:], COLUMNS], strict=True)
        if (own := longest[begin]) != State.OUTSIDE
    ]
    return f'<svg viewBox="0 0 {COLUMNS} 1" preserveAspectRatio="none">{"".join(parts)}</svg>'


def load(folder: Path, run: Mapping[str, Any]) -> Traced | None:
    """Return the traced steps of a run; None if it has none."""
    own = folder / "runs" / Cell(*(run[name] for name in Cell._fields)).name
    if run["framework"] == "pydtnn" and (own / "trace").exists():
        timeline = load_timeline(own / "trace")
        steps, states = timeline.steps, find_states(timeline)
        if timeline.size == 1:  # nothing is in flight
            states[0].state[states[0].state == State.OVERLAP] = State.COMPUTE
        return Traced(np.stack([steps.start, steps.stop], axis=1), states)
    if run["framework"] not in RULES or not run.get("traced"):
        return None
    rule = RULES[run["framework"]]
    profiles = [
        read_profile(own / f"trace-{rank}.json", rule, begun)
        for rank, begun in enumerate(run["traced"])
    ]
    steps = np.stack([one.steps for one in profiles], axis=-1)
    return Traced(steps, states_of(profiles))


def find(
    folder: Path, plan: Plan, runs: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int, dict[str, Traced]]]:
    """Yield the traced runs of all networks and numbers of ranks that have some, by framework."""
    for network in plan.networks:
        for ranks in plan.ranks:
            chosen = {
                run["framework"]: traced
                for run in runs
                if (run["network"], run["ranks"]) == (network, ranks) and "error" not in run
                if (traced := load(folder, run))
            }
            if chosen:
                yield network, ranks, {n: chosen[n] for n in plan.frameworks if n in chosen}


def cells(name: str, one: Traced) -> list[str]:
    """Return the row of a framework, under `HEADS`."""
    parts = one.shares()[[*COLORS]]
    return [FRAMEWORKS[name].title, *(f"{1e3 * t:.4g}" for t in (parts.sum(), *parts))]


def create(folder: Path, plan: Plan, runs: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write the page of all traced runs; return its path, or nothing if there are none."""
    key = "".join(f'<span><i style="background:{c}"></i>{n}</span>' for c, n in COLORS.values())
    page = [beginning("Traced steps"), STYLE, "<h1>Traced steps</h1>", f'<p class="key">{key}</p>']
    empty = len(page)
    for network, ranks, chosen in find(folder, plan, runs):
        until = max(float(np.median(one.duration)) for one in chosen.values())
        end = f"the bars end at {until / 1e6:.4g} ms"
        page.append(f"<h2>{html.escape(network)}, {ranks} rank{'s' * (ranks > 1)}: {end}</h2>")
        for name, one in chosen.items():
            page.append(f"<h3>{html.escape(FRAMEWORKS[name].title)}</h3>")
            for rank, bar in enumerate(one.picture(until)):
                page.append(f'<div class="rank"><span>rank {rank}</span>{bar}</div>')
        page.append(table(HEADS, [cells(name, one) for name, one in chosen.items()]))
    if len(page) == empty:
        return []
    path = folder / PAGE
    write_file("evaluation", path, ("\n".join(page) + "\n").encode())
    return [path]

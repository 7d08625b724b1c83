"""A step as execution traces of Chakra, which simulators such as ASTRA-sim read: a file per rank.

Of the recorded steps, the one of median duration is written. Its nodes are what the main thread
computes, pass by pass of the layers, each after the one before it; collectives and messages, each
after what was computed before its call; what follows a wait depends on what it has waited for. The
time inside of calls and waits is left to the simulator.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pydtnn.tools.tracing.analysis.calls import POSTS, Programs, TracedCall
from pydtnn.tools.tracing.analysis.states import State, States, find_states
from pydtnn.tools.tracing.chakra import ChakraNode, CommType, NodeType, encode
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.files import check_new, write_file
from pydtnn.utils.observer import Kind, layer_of

COLLECTIVES = {
    "allreduce": CommType.ALL_REDUCE,
    "iallreduce": CommType.ALL_REDUCE,
    "broadcast": CommType.BROADCAST,
    "reduce_scatter": CommType.REDUCE_SCATTER,
    "allgather": CommType.ALL_GATHER,
    "gather_object": CommType.BARRIER,
    "barrier": CommType.BARRIER,
}
"""Type of the calls; objects that are gathered are short."""


def write_chakra(timeline: Timeline, folder: Path) -> None:
    """Write ``step.0.et``, ``step.1.et``, ... into a new folder.

    If collectives have other groups than that of all ranks, ``groups.json`` contains their members
    by the attribute `pg_name` of nodes, as ASTRA-sim reads it.

    Raises
    ------
    ValueError
        If there is no step that all ranks have recorded, or steps are CUDA graphs.
    OSError
        If the folder exists or cannot be created.
    """
    ranks, groups = to_nodes(timeline)
    check_new("trace export", folder)
    for rank, nodes in enumerate(ranks):
        write_file("trace export", folder / f"step.{rank}.et", encode(nodes))
    if groups:
        write_file("trace export", folder / "groups.json", json.dumps(groups).encode())


def to_nodes(timeline: Timeline) -> tuple[list[list[ChakraNode]], dict[str, list[int]]]:
    """Return the nodes of each rank, and the ranks of each group but that of all ranks.

    Raises ValueError as `write_chakra` does.
    """
    steps = timeline.steps
    if not len(steps) or "replay" in timeline.names:
        raise ValueError(
            "trace export: expected a trace with the calls of training steps, got none that all "
            "ranks have recorded, or CUDA graphs; record several steps, without "
            "graphs (--device cuda:graph=false)"
        )
    taken = steps.stop.max(axis=1) - steps.start.min(axis=1)
    step = int(np.argsort(taken, kind="stable")[len(steps) // 2])
    programs, states = Programs(timeline), find_states(timeline)
    parts = {name: own for name, own in programs.groups.items() if len(own) < timeline.size}
    numbers = {name: str(number) for number, name in enumerate(parts, 1)}
    ranks = []
    for rank, program in enumerate(programs.of()):
        own = _Rank(timeline, rank, step, programs.groups, numbers)
        ranks.append(own.build(program.calls, states[rank]))
    return _matched(ranks), {numbers[name]: own for name, own in parts.items()}


@dataclass
class _Rank:
    """The nodes of a rank."""

    timeline: Timeline
    rank: int
    step: int
    groups: Mapping[str, list[int]]
    numbers: Mapping[str, str]

    def __post_init__(self) -> None:
        steps = self.timeline.steps
        starts, stops = steps.start[self.step], steps.stop[self.step]
        self.start, self.stop = int(starts[self.rank]), int(stops[self.rank])
        self.origin = int(starts.min())
        self.computed = 0  # ns, so that rounded durations add up
        self.nodes: list[ChakraNode] = []
        self.last = 0  # the last computation
        self.needed: set[int] = set()  # by the next computation
        self.pending: dict[tuple[str, str], list[tuple[TracedCall, list[int]]]] = defaultdict(list)

    def build(self, calls: list[TracedCall], states: States) -> list[ChakraNode]:
        """Return the nodes of the step."""
        runs = [*states.runs((State.COMPUTE, State.OVERLAP)), (0, 0, self.stop, self.stop)]
        inside = iter([one for one in calls if self.start <= one.time < self.stop and one.group])
        call = next(inside, None)
        for _, activity, start, stop in runs:
            while call is not None and call.time <= start:
                self._call(call)
                call = next(inside, None)
            if self.start <= start < self.stop:
                self._compute(activity, start, stop)
        for own in self.pending.values():
            for post, ids in own:
                if post.name in POSTS and all(one.stop <= self.stop for one in post.messages):
                    self.needed.update(ids)
        if self.needed:
            self._add("step", NodeType.COMP, self.stop, {})
        return self.nodes

    def _compute(self, activity: int, start: int, stop: int) -> None:
        before, self.computed = self.computed, self.computed + stop - start
        duration = round(self.computed / 1000) - round(before / 1000)
        if not duration:
            return
        row, costs = self.timeline.activities[activity] if activity >= 0 else None, {}
        name = "step" if row is None else self.timeline.title(int(row["kind"]), int(row["name"]))
        if row is not None and row["kind"] in (Kind.FORWARD, Kind.BACKWARD):
            layer = layer_of(self.timeline.names[row["name"]])
            facts = self.timeline.about[self.rank].get("layers", {}).get(layer)
            what, share = Kind(int(row["kind"])).name.lower(), (stop - start) / int(row["own"])
            if facts:
                costs["num_ops"] = round(share * facts[f"{what}_flops"])
                costs["tensor_size"] = round(share * facts[f"{what}_bytes"])
        self._add(name, NodeType.COMP, start, costs, duration)

    def _call(self, call: TracedCall) -> None:
        own = self.pending[call.group, call.name]
        if call.waits:
            if own:
                self.needed.update(own.pop(call.awaited([post for post, _ in own]))[1])
        elif call.name in POSTS:
            own.append((call, [*self._messages(call)]))
        elif call.name in COLLECTIVES:
            ranks = len(self.groups[call.group])
            kind, size = COLLECTIVES[call.name], call.length(ranks)
            if kind == CommType.ALL_GATHER:  # the part of this rank
                size = call.nbytes // max(ranks - 1, 1)
            which: dict[str, int | str] = {"comm_type": kind.value, "comm_size": size}
            if number := self.numbers.get(call.group):
                which["pg_name"] = number
            node = self._add(call.name, NodeType.COMM_COLL, call.time, which)
            if call.name == "iallreduce":
                own.append((call, [node]))
            else:
                self.needed.add(node)

    def _messages(self, call: TracedCall) -> Iterator[int]:
        for one in call.messages:
            ends = (self.rank, one.peer) if one.sends else (one.peer, self.rank)
            kind = NodeType.COMM_SEND if one.sends else NodeType.COMM_RECV
            more = {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": one.tag}
            yield self._add(call.name, kind, call.time, {"comm_size": one.nbytes, **more})

    def _add(
        self,
        name: str,
        kind: NodeType,
        start: int,
        attributes: Mapping[str, int | str],
        duration: int = 0,
    ) -> int:
        """Add a node after the last computation, and after what it has waited for."""
        number, before = len(self.nodes) + 1, [self.last] * (self.last > 0)
        data = sorted({*before, *self.needed})
        time = round((start - self.origin) / 1000)
        more = {"is_cpu_op": False, **attributes}
        self.nodes.append(ChakraNode(number, name, kind, data, before, time, duration, more))
        if kind == NodeType.COMP:
            self.last = number
            self.needed.clear()
        return number


def _matched(ranks: list[list[ChakraNode]]) -> list[list[ChakraNode]]:
    """Leave out messages whose other side is in another step."""
    sides: dict[NodeType, Counter[tuple[int, ...]]] = defaultdict(Counter)
    kept: dict[NodeType, Counter[tuple[int, ...]]] = defaultdict(Counter)
    other = {
        NodeType.COMM_SEND: NodeType.COMM_RECV,
        NodeType.COMM_RECV: NodeType.COMM_SEND,
    }

    def channel(node: ChakraNode) -> tuple[int, ...]:
        return tuple(node.attributes[f"comm_{end}"] for end in ("src", "dst", "tag"))

    for node in (node for nodes in ranks for node in nodes if node.type in other):
        sides[node.type][channel(node)] += 1
    result = []
    for nodes in ranks:
        gone = set()
        for node in (node for node in nodes if node.type in other):
            key = channel(node)
            kept[node.type][key] += 1
            if kept[node.type][key] > sides[other[node.type]][key]:
                gone.add(node.id)
        for node in nodes:
            node.data = [one for one in node.data if one not in gone]
        result.append([node for node in nodes if node.id not in gone])
    return result

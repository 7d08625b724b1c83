"""The part of a graph that one stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple

from pydtnn.layers.activation import ReLU
from pydtnn.layers.base import Layer, Shape
from pydtnn.layers.merge import Add
from pydtnn.layers.node import Node
from pydtnn.layers.norm import BatchNorm
from pydtnn.layers.statistics import RUNNING
from pydtnn.model.graph import Graph
from pydtnn.model.parts import PartSizes
from pydtnn.model.pipeline.schedules import Owners
from pydtnn.model.placement import completed
from pydtnn.utils.names import shorten, unknown

MEMORY, MESSAGES = 8.0, 40.0
"""Floating-point operations that take as long as moving a byte in memory, and sending one."""


def crossing(nodes: Sequence[Node], outputs: Sequence[Node], start: int) -> list[Node]:
    """Return the nodes before index `start` with outputs that are read from there on.

    Parameters
    ----------
    nodes : sequence of Node
        All nodes, the model's inputs first.
    outputs : sequence of Node
        Outputs of the model, which its last stage returns.
    start : int
        Index of the first node of a stage.

    Returns
    -------
    list of Node
        In the order of execution, without the model's inputs: every rank has these.
    """
    return [
        node
        for node in nodes[:start]
        if node.inputs and (node in outputs or any(n.index >= start for n in node.consumers))
    ]


def named_boundaries(nodes: Sequence[Node], names: Sequence[str], stages: int) -> list[int]:
    """Return the index of the first node of each further stage from names of layers or blocks.

    Parameters
    ----------
    nodes : sequence of Node
    names : sequence of str
        First layer or block of each stage but the first, such as "stage2".
    stages : int

    Raises
    ------
    ValueError
        If a name is unknown, there are too few or too many, or their order is wrong.
    """
    if len(names) != stages - 1:
        raise ValueError(
            f"pipeline: expected the first layers of {stages - 1} further stages for {stages} "
            f"stages, got {shorten(names)}; give one name for each stage but the first"
        )
    layers = [node for node in nodes if node.inputs]
    starts: list[int] = []
    for name in names:
        within = [n.index for n in layers if n.name == name or n.name.startswith(f"{name}.")]
        if not within:
            blocks = {n.name.rpartition(".")[0] for n in layers} - {""}
            raise ValueError(
                f"pipeline: {unknown('layer', name, [*blocks, *(n.name for n in layers)])}"
            )
        starts.append(within[0])
    least = layers[0].index
    for name, start in zip(names, starts, strict=True):
        if start <= least:
            raise ValueError(
                f"pipeline: expected stages in the order of execution, none of them empty, got "
                f"{shorten(names)}, where {name} is not after the beginning of the stage "
                "before it; "
                "change the order"
            )
        least = start
    return starts


def balanced_boundaries(nodes: Sequence[Node], outputs: Sequence[Node], stages: int) -> list[int]:
    """Return the index of the first node of each further stage so that stages take equal times.

    The largest stage is minimised over all cuts of the order of execution, by dynamic programming.
    The time of a stage is that of forward and backward of its layers (`Layer.cost`) and of its
    messages. A layer that fusion combines with the one before it stays in the same stage, unless
    there are too few others; all uses of a layer with parameters do in any case.

    Parameters
    ----------
    nodes, outputs : sequence of Node
    stages : int

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    layers = [node for node in nodes if node.inputs]
    split = _splits_uses(layers)
    allowed = [node for node in layers[1:] if node.index not in split]
    if len(allowed) < stages - 1:
        shared = "" if len(allowed) == len(layers) - 1 else ", some of which share parameters"
        raise ValueError(
            f"pipeline: expected at most {len(allowed) + 1} stages for a network of {len(layers)} "
            f"layers{shared}, got {stages}; use fewer ranks along the axis"
        )
    fused = [node for node in allowed if isinstance(node.layer, BatchNorm | ReLU | Add)]
    apart = [node for node in allowed if node not in fused]
    starts = [node.index for node in (apart if len(apart) >= stages - 1 else allowed)]
    first, end = layers[0].index, layers[-1].index + 1
    work = [0.0]
    for node in layers:
        work.append(work[-1] + work_of(node.layer))
    sent = {start: message_bytes(nodes, outputs, start) for start in starts} | {first: 0, end: 0}

    def time(start: int, stop: int) -> float:
        own = work[stop - first] - work[start - first]
        return own + MESSAGES * (sent[start] + sent[stop])

    return smallest_largest([first, *starts, end], stages, time)


def work_of(layer: Layer) -> float:
    """Return the time of one sample's forward and backward, in floating-point operations."""
    cost = layer.cost(1)
    moved = cost.bytes_forward + cost.bytes_backward
    return cost.flops_forward + cost.flops_backward + MEMORY * moved


def message_bytes(nodes: Sequence[Node], outputs: Sequence[Node], start: int) -> int:
    """Return the bytes that are sent over a boundary for one sample, in one direction."""
    return sum(
        prod(node.shape) * node.layer.parameter_dtype.itemsize
        for node in crossing(nodes, outputs, start)
    )


def _splits_uses(layers: Sequence[Node]) -> set[int]:
    """Return the boundaries between two uses of the same parameters or statistics."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in layers:
        for part in state_of(node.layer):
            first.setdefault(part, node.index)
            last[part] = node.index
    return {start for part in first for start in range(first[part] + 1, last[part] + 1)}


def state_of(layer: Layer) -> set[int]:
    """Return identifiers of a layer's parameters and running statistics."""
    return {*(id(p.source) for p in layer.parameters), *map(id, layer.statistics)}


def smallest_largest(
    places: Sequence[int], stages: int, time: Callable[[int, int], float]
) -> list[int]:
    """Return the places, without the first and last, that minimise the longest of the stages.

    Parameters
    ----------
    places : sequence of int
        Where a stage may begin, and the end of the last one.
    stages : int
        At most one less than the places.
    time : callable
        Returns the time of the stage between two places.
    """
    longest = [[inf] * len(places) for _ in range(stages + 1)]
    last = [[0] * len(places) for _ in range(stages + 1)]
    longest[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, len(places)):
            for start in range(stage - 1, stop):
                if longest[stage - 1][start] < longest[stage][stop]:
                    value = max(longest[stage - 1][start], time(places[start], places[stop]))
                    if value < longest[stage][stop]:
                        longest[stage][stop], last[stage][stop] = value, start
    chosen: list[int] = []
    place = len(places) - 1
    for stage in range(stages, 1, -1):
        place = last[stage][place]
        chosen.append(places[place])
    return chosen[::-1]


class StageValue(NamedTuple):
    """The output of a layer that is sent from one stage to the next.

    Attributes
    ----------
    name : str
        Name of the layer.
    shape : tuple of int
        Shape of one sample.
    """

    name: str
    shape: Shape


class Stage(NamedTuple):
    """One of a rank's stages of a network.

    Attributes
    ----------
    number : int
        From 0, of all stages of the network.
    reads : tuple of int
        Positions of the inputs of the model that the stage reads.
    receives, sends : tuple of Value
        Values from the stage before and to the stage after. A value that a later stage reads is
        sent through all stages between.
    """

    number: int
    reads: tuple[int, ...]
    receives: tuple[StageValue, ...]
    sends: tuple[StageValue, ...]


class PipelineCut(NamedTuple):
    """The stages of a rank.

    Attributes
    ----------
    owners : Owners
        The ranks of the stages of the network.
    stages : tuple of Stage
        Those of this rank, in order.
    outputs : tuple of tuple of Node
        For each of them the values to send, or the outputs of the model in the last one.
    output_shapes : tuple of tuple of int
        Of the model.
    shapes : dict of str to tuple of int
        Of the parameters and running statistics of the model, all stages together, by name.
    """

    owners: Owners
    stages: tuple[Stage, ...]
    outputs: tuple[tuple[Node, ...], ...]
    output_shapes: tuple[Shape, ...]
    shapes: dict[str, Shape]

    @property
    def sizes(self) -> list[PartSizes]:
        """Numbers of inputs and outputs of each of the rank's stages."""
        return [
            PartSizes(len(stage.reads), len(stage.receives), len(outputs))
            for stage, outputs in zip(self.stages, self.outputs, strict=True)
        ]


def cut_stages(
    graph: Graph,
    outputs: Sequence[Node],
    owners: Owners,
    rank: int,
    names: Sequence[str],
) -> PipelineCut:
    """Cut a graph into pipeline stages, and leave those of one rank in it.

    All ranks compute the same cut, each from the graph of the whole network. The inputs of the
    graph are then, for each stage of the rank, those of the model that the stage reads, followed by
    the received values.

    Parameters
    ----------
    graph : Graph
        All nodes of the network, neither fused nor finished; its nodes are replaced.
    outputs : sequence of Node
        Outputs of the model.
    owners : Owners
        The ranks of the stages.
    rank : int
    names : sequence of str, optional
        Layers or blocks with which the further stages begin; by default stages of about equal time
        (`balanced_boundaries`).

    Raises
    ------
    ValueError
        If there are fewer layers than stages, a name is unknown, or a layer with parameters is
        used in two stages.
    """
    nodes, count = graph.nodes, owners.stages
    if names:
        starts = named_boundaries(nodes, names, count)
    else:
        starts = balanced_boundaries(nodes, outputs, count)
    bounds = [len(graph.inputs), *starts, len(nodes)]
    layers = [nodes[a:b] for a, b in pairwise(bounds)]
    _check_uses(layers)
    crosses = [*(crossing(nodes, outputs, start) for start in bounds[:-1]), [*outputs]]
    sent = [tuple(StageValue(node.name, node.shape) for node in values) for values in crosses]
    sent[-1] = ()
    own: list[Stage] = []
    for number in owners.stages_of(rank):
        first, last = bounds[number : number + 2]
        read = tuple(
            i
            for i, node in enumerate(graph.inputs)
            if any(first <= n.index < last for n in node.consumers) or node in crosses[number + 1]
        )
        own.append(Stage(number, read, sent[number], sent[number + 1]))
    state, shapes = shapes_of_state(graph), tuple(node.shape for node in outputs)
    sources = [[*(graph.inputs[i] for i in s.reads), *crosses[s.number]] for s in own]
    new = Graph(
        [node.shape for nodes in sources for node in nodes],
        backend=graph.backend,
        dtype=str(graph.dtype),
    )
    inputs, results = iter(new.inputs), []
    for stage, values in zip(own, sources, strict=True):
        replaced = dict(zip(values, inputs, strict=False))
        for source, node in replaced.items():
            node.layer.name = source.name
        new.adopt(layers[stage.number], replaced)
        results.append(tuple(replaced.get(node, node) for node in crosses[stage.number + 1]))
    graph.inputs, graph.nodes = new.inputs, new.nodes
    return PipelineCut(owners, tuple(own), tuple(results), shapes, state)


def shapes_of_state(graph: Graph) -> dict[str, Shape]:
    """Return the shapes of all parameters and running statistics of a graph by name."""
    shapes: dict[str, Shape] = {p.name: p.shape for p, _ in completed(graph)}
    statistics = dict.fromkeys(s for node in graph.nodes for s in node.layer.statistics)
    return shapes | {f"{s.name}.{what}": (s.channels,) for s in statistics for what in RUNNING}


def _check_uses(stages: Sequence[Sequence[Node]]) -> None:
    """Raise ValueError if the same parameters or running statistics are in two stages."""
    found: dict[int, tuple[int, str]] = {}
    for number, nodes in enumerate(stages):
        for node in nodes:
            for part in state_of(node.layer):
                other, name = found.setdefault(part, (number, node.name))
                if other != number:
                    raise ValueError(
                        f"pipeline: expected all uses of a layer in one stage, got {name} in stage "
                        f"{other} and its other use {node.name} in stage {number}; name other "
                        "layers to cut at"
                    )

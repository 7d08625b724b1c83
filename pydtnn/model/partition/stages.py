"""The part of a graph that one stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pydtnn.layers.base import Shape
from pydtnn.layers.node import Node
from pydtnn.layers.statistics import RUNNING
from pydtnn.model.graph import Graph
from pydtnn.model.partition.rules import (
    balanced_boundaries,
    crossing,
    named_boundaries,
    state_of,
)
from pydtnn.model.placement import completed


class Value(NamedTuple):
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


class StageCut(NamedTuple):
    """One stage of a network.

    Attributes
    ----------
    outputs : tuple of Node
        The outputs of the model in the last stage, otherwise the values to send.
    reads : tuple of int
        Positions of the inputs of the model that the stage reads.
    receives, sends : tuple of Value
        Values from the stage before and to the stage after. A value that a later stage reads is
        sent through all stages between.
    output_shapes : tuple of tuple of int
        Of the model.
    shapes : dict of str to tuple of int
        Of the parameters and running statistics of the model, all stages together, by name.
    layers, first_layers : tuple of str
        Names of the layers of the model, and of the first one of each stage.
    """

    outputs: tuple[Node, ...]
    reads: tuple[int, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    output_shapes: tuple[Shape, ...]
    shapes: dict[str, Shape]
    layers: tuple[str, ...]
    first_layers: tuple[str, ...]


def cut_stages(
    graph: Graph, outputs: Sequence[Node], stages: int, stage: int, names: Sequence[str] = ()
) -> StageCut:
    """Cut a graph into pipeline stages, and leave one of them in it.

    All ranks compute the same cut, each from the graph of the whole network. The inputs of the
    graph are then those of the model that the stage reads, followed by the received values.

    Parameters
    ----------
    graph : Graph
        All nodes of the network, neither fused nor finished; its nodes are replaced.
    outputs : sequence of Node
        Outputs of the model.
    stages, stage : int
        Number of stages, and the one of this rank.
    names : sequence of str, optional
        Layers or blocks with which the further stages begin; by default stages of about equal time
        (`balanced_boundaries`).

    Raises
    ------
    ValueError
        If there are fewer layers than stages, a name is unknown, or a layer with parameters is
        used in two stages.
    """
    nodes = graph.nodes
    if names:
        starts = named_boundaries(nodes, names, stages)
    else:
        starts = balanced_boundaries(nodes, outputs, stages)
    bounds = [len(graph.inputs), *starts, len(nodes)]
    own = [nodes[a:b] for a, b in pairwise(bounds)]
    _check_uses(own)
    first, last = bounds[stage], bounds[stage + 1]
    received = crossing(nodes, outputs, first)
    sent = [*outputs] if stage == stages - 1 else crossing(nodes, outputs, last)
    read = [
        i
        for i, node in enumerate(graph.inputs)
        if any(first <= n.index < last for n in node.consumers) or node in sent
    ]
    state = shapes_of_state(graph)
    layers = tuple(node.name for node in nodes if node.inputs)
    values = tuple(Value(node.name, node.shape) for node in received)
    sends = () if stage == stages - 1 else tuple(Value(n.name, n.shape) for n in sent)
    shapes = tuple(node.shape for node in outputs)
    firsts = tuple(nodes[start].name for start in bounds[:-1])
    new = Graph(
        [graph.inputs[i].shape for i in read] + [value.shape for value in values],
        backend=graph.backend,
        dtype=str(graph.dtype),
    )
    sources = [graph.inputs[i] for i in read] + received
    replaced = dict(zip(sources, new.inputs, strict=True))
    for source, node in replaced.items():
        node.layer.name = source.name
    new.adopt(own[stage], replaced)
    graph.inputs, graph.nodes = new.inputs, new.nodes
    return StageCut(
        tuple(replaced.get(node, node) for node in sent),
        tuple(read),
        values,
        sends,
        shapes,
        state,
        layers,
        firsts,
    )


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

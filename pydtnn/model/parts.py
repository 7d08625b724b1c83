"""Parts of a graph: nodes that run in one pass, one part for each stage that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from pydtnn.layers.node import Node


class GraphPart(NamedTuple):
    """Nodes that run in one pass: all, or those of one of a rank's stages of a pipeline.

    Attributes
    ----------
    inputs, outputs : tuple of Node
    layers : tuple of Node
        In the order of execution, without the inputs.
    """

    inputs: tuple[Node, ...]
    layers: tuple[Node, ...]
    outputs: tuple[Node, ...]


class PartSizes(NamedTuple):
    """Numbers of inputs of the model, of received values, and of outputs of a `GraphPart`."""

    reads: int
    receives: int
    outputs: int


def find_parts(
    inputs: Sequence[Node],
    layers: Sequence[Node],
    outputs: Sequence[Node],
    sizes: Sequence[PartSizes],
    input_gradient: bool,
) -> tuple[tuple[GraphPart, ...], list[Node]]:
    """Divide the nodes of a graph; a layer is in the part of its inputs.

    Parameters
    ----------
    inputs, layers, outputs : sequence of Node
        Of the graph; inputs and outputs of the parts follow each other.
    sizes : sequence of PartSizes
    input_gradient : bool
        Whether the gradients of all inputs are needed; those of received values are.

    Returns
    -------
    tuple of Part
    list of Node
        The inputs whose gradients are needed.
    """
    first, last = iter(inputs), iter(outputs)
    place: dict[Node, int] = {}
    ends: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
    differentiated: list[Node] = []
    for number, (reads, receives, results) in enumerate(sizes):
        own = tuple(islice(first, reads + receives))
        place |= dict.fromkeys(own, number)
        differentiated += own if input_gradient else own[reads:]
        ends.append((own, tuple(islice(last, results))))
    for node in layers:
        place[node] = place[node.inputs[0]]
    parts = tuple(
        GraphPart(own, tuple(node for node in layers if place[node] == number), results)
        for number, (own, results) in enumerate(ends)
    )
    return parts, differentiated

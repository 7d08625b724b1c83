"""A node of a model's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydtnn.layers.base import Layer, Shape


class Node:
    """One layer of a graph with its connections.

    Attributes
    ----------
    index : int
        Position in the order of execution; the model's inputs come first.
    layer : Layer
        For the model's inputs, an `Identity` that never runs.
    inputs : tuple of Node
    shape : tuple of int
        Shape of the output, without the batch axis.
    consumers : list of Node
        Nodes that read the output.
    pitched : tuple of int
        Positions of inputs to which it passes views of its gradient, which only sums read.
    releases : tuple of int
        Indices of the nodes whose outputs are not used after this node has run.
    part : tuple of slice or None
        For an input of the model, the part of each sample that this rank of a mesh reads, if not
        all of it.
    layout : mapping of str to State
        How the output is spread over the ranks along the axes of a mesh, see
        `pydtnn.model.partition.exchange`; axes along which it is whole may be omitted.
    """

    def __init__(self, index: int, layer: Layer, inputs: tuple[Node, ...], shape: Shape) -> None:
        self.index = index
        self.layer = layer
        self.inputs = inputs
        self.shape = shape
        self.consumers: list[Node] = []
        self.releases: tuple[int, ...] = ()
        self.pitched: tuple[int, ...] = ()
        self.part: tuple[slice, ...] | None = None
        self.layout: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        """The layer's dotted name."""
        return str(self.layer.name)


Outputs: TypeAlias = Node | tuple[Node, ...]
"""The output of a part of a model, a tuple if it has several."""


def nodes(outputs: Outputs) -> tuple[Node, ...]:
    """Return one output, or several, as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)

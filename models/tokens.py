"""What the networks for text ask of their inputs."""

from __future__ import annotations

from typing import Any

from pydtnn.layers import Block, DotProductAttention, Net, PositionalEmbedding, Rotary
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.node import Node, Outputs

TAKE_DOCUMENTS = (DotProductAttention, PositionalEmbedding, Rotary)


def check_tokens(who: str, input_shape: tuple[Any, ...], *, documents: bool = False) -> None:
    """Raise ValueError if samples are not sequences of tokens, with `documents` if they may be."""
    several = documents and len(input_shape) == 2 and input_shape[0] == input_shape[1]
    shape = input_shape[0] if several and isinstance(input_shape[0], tuple) else input_shape
    if len(shape) != 1 or isinstance(shape[0], tuple):
        others = " or ((T,), (T,)) with documents" if documents else ""
        raise ValueError(
            f"{who}: expected sequences of tokens, of shape (T,){others}, got "
            f"{tuple(input_shape)}; use --dataset text, or another network for images"
        )


def with_documents(net: Block, input_shape: tuple[Any, ...]) -> Block:
    """Return a network of tokens, or of tokens and documents if samples have two inputs."""
    return WithDocuments(net) if isinstance(input_shape[0], tuple) else net


class WithDocuments(Block):
    """A network whose layers that take documents are given those of a further input.

    Parameters
    ----------
    net : Net

    Notes
    -----
    Inputs ``(N, T)``, tokens, and ``(N, T)``, the document of each one: see `DotProductAttention`.
    Layers and parameters have the names that they have in `net`.
    """

    def __init__(self, net: Net) -> None:
        super().__init__(name="")
        self.net = net

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect the network to the tokens."""
        tokens, documents = inputs
        return _Builder(graph, documents).add(self.net, tokens)


class _Builder:
    """A graph that gives documents to the layers that take them."""

    def __init__(self, graph: GraphBuilder, documents: Node) -> None:
        self.graph, self.documents = graph, documents

    def add(self, part: Any, *inputs: Node, label: str = "") -> Any:
        if not isinstance(part, Block):
            own = (self.documents,) if type(part) in TAKE_DOCUMENTS else ()
            return self.graph.add(part, *inputs, *own, label=label)
        if label.isdigit():
            label = type(part).__name__.lower() + label
        return self.graph.add(_Wired(part, self), *inputs, label=label)


class _Wired(Block):
    """A block that is added to another graph."""

    def __init__(self, part: Block, graph: _Builder) -> None:
        super().__init__(name=part.name)
        self.part, self.graph = part, graph

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        return self.part.wire(self.graph, *inputs)

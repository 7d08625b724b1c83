"""Classifiers within a network, whose losses are added to that of its output in training."""

from __future__ import annotations

from collections.abc import Mapping

from pydtnn.layers import Block, Net
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.node import Node, Outputs, nodes


class Heads(Block):
    """Parts one after the other; heads read the outputs of some of them.

    Parameters
    ----------
    *parts : Layer or Block
        Each with a name.
    heads : mapping of str to Layer or Block
        A head for each part of these names.
    name : str, optional

    Notes
    -----
    The outputs are that of the last part and those of the heads, in the order of the parts. The
    layers of the parts have the same names as in ``Sequential(*parts)``, where their weights can be
    loaded.
    """

    def __init__(self, *parts: Net, heads: Mapping[str, Net], name: str | None = None) -> None:
        super().__init__(name=name)
        unknown = heads.keys() - {part.name for part in parts}
        if unknown:
            raise ValueError(f"Heads: expected names of parts, got {', '.join(sorted(unknown))}")
        self.parts, self.heads = parts, heads

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect each part to the one before, and each head to its part."""
        outputs: list[Node] = []
        for part in self.parts:
            inputs = nodes(graph.add(part, *inputs))
            head = self.heads.get(part.name or "")
            if head is not None:
                outputs += nodes(graph.add(head, *inputs))
        return (*inputs, *outputs)

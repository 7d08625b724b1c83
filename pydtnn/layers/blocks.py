"""Blocks, which add layers to the graph and are not part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast, overload

from pydtnn.layers.base import Layer
from pydtnn.layers.merge import Add
from pydtnn.layers.node import Node, Outputs, nodes
from pydtnn.layers.reshape import Identity
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.moved import renamed
from pydtnn.utils.names import NotCallable


class GraphBuilder(Protocol):
    """The graph of a model, to which a block adds its parts: `pydtnn.model.graph.Graph`."""

    @overload
    def add(self, part: Layer, *inputs: Node, label: str = "") -> Node: ...

    @overload
    def add(self, part: Net, *inputs: Node, label: str = "") -> Outputs: ...


class Block(NotCallable, StoresArguments, ABC):
    """Base class of compositions of layers and other blocks.

    A subclass implements `wire`, which adds its parts to the graph with any connections and returns
    the last node, or a tuple of nodes if the block has several outputs.
    """

    name: str | None = None

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name

    @abstractmethod
    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Add the parts to `graph`, fed by `inputs`; return the node that is the block's output."""


Net = Layer | Block
"""A layer or block, from which a model is built."""


class Sequential(Block):
    """Parts one after the other; the first takes all the inputs.

    Parameters
    ----------
    *parts : Layer or Block
        A single list of them is also accepted.
    name : str, optional
        Component of the dotted names of the layers within; an empty one adds no component.
    """

    def __init__(self, *parts: Net | Sequence[Net], name: str | None = None) -> None:
        if len(parts) == 1 and isinstance(parts[0], list | tuple):
            parts = tuple(parts[0])
        if not parts:
            raise ValueError("Sequential: expected at least one layer, got none; use Identity()")
        super().__init__(name=name)
        self.parts = cast(tuple[Net, ...], parts)

    def __iter__(self) -> Iterator[Net]:
        return iter(self.parts)

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect each part to the one before."""
        for i, part in enumerate(self.parts):
            outputs = graph.add(part, *inputs, label=str(i))
            inputs = nodes(outputs)
        return outputs


class Branches(Block):
    """Parts side by side on the same input, then merged.

    Parameters
    ----------
    *parts : Layer or Block
    merge : Layer
        Layer with one input per part, such as `Add()` or `Concat()`.
    name : str, optional
    """

    def __init__(self, *parts: Net, merge: Net, name: str | None = None) -> None:
        if len(parts) < 2:
            raise ValueError("Branches: expected at least two parts; use Sequential for one")
        super().__init__(name=name)
        self.parts = parts
        self.merge = merge

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect every part to the inputs, and the merge to every part."""
        outputs = [graph.add(p, *inputs, label=str(i)) for i, p in enumerate(self.parts)]
        return graph.add(self.merge, *chain(*map(nodes, outputs)), label="merge")


class Residual(Branches):
    """``y = body(x) + shortcut(x)``.

    Parameters
    ----------
    body : Layer or Block
    shortcut : Layer or Block, optional
        The identity by default; a projection where body changes the shape.
    name : str, optional

    References
    ----------
    He et al., "Deep Residual Learning for Image Recognition", 2016, equations 1 and 2.
    """

    def __init__(self, body: Net, shortcut: Net | None = None, *, name: str | None = None) -> None:
        shortcut = Identity() if shortcut is None else shortcut
        super().__init__(body, shortcut, merge=Add(), name=name)

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        """Connect body and shortcut to the input; an identity shortcut adds no node."""
        body, shortcut = self.parts
        y = nodes(graph.add(body, *inputs, label="body"))
        identity = isinstance(shortcut, Identity) and len(inputs) == 1
        x = inputs if identity else nodes(graph.add(shortcut, *inputs, label="shortcut"))
        return graph.add(self.merge, *y, *x, label="add")


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = renamed(__name__)

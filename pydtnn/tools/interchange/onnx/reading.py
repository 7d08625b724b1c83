"""A node of an ONNX graph while it is read, and what its readers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from pydtnn.layers import Layer
from pydtnn.layers.node import Node as GraphNode
from pydtnn.tools.interchange.onnx.graph import NodeGraph, OnnxNode
from pydtnn.tools.interchange.onnx.views import Atoms, ModelArray, Value, Wiring

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Repeated:
    """A constant that is the same for each sample, with as many rows as a batch along an axis.

    Attributes
    ----------
    array : Array
        With the axis of size 1.
    axis : int
        0, or 1 for states (D, N, H) before the first step of a recurrent layer.
    """

    array: Array
    axis: int = 0


@dataclass(frozen=True, eq=False)
class Reading:
    """A node that is read.

    Attributes
    ----------
    node : Node
    graph : NodeGraph
    net : Wiring
    inputs : list
        A `Value`, a constant, a constant that is `Repeated`, or None for an omitted input.
    values : dict
        Those of the graph so far, by name.
    """

    node: OnnxNode
    graph: NodeGraph
    net: Wiring
    inputs: list[Any]
    values: dict[str, Any]

    def value(self, place: int = 0) -> Value:
        """Return an input that is computed, by layers."""
        return self.net.solid(self.lazy(place))

    def lazy(self, place: int = 0) -> Value:
        """Return an input that is computed, perhaps with a factor that has no layer yet."""
        given = self.inputs[place] if place < len(self.inputs) else None
        if not isinstance(given, Value):
            raise self.fail(f"input {place} must be computed, got a constant or none")
        if given.integer:
            raise self.fail(f"input {place} must be of floating point, got integers")
        return given

    def constant(self, place: int) -> Array | None:
        """Return the constant that is an input; None if it is omitted.

        Raises
        ------
        ValueError
            If it is computed.
        """
        given = self.inputs[place] if place < len(self.inputs) else None
        if given is not None and not isinstance(given, np.ndarray):
            name = self.node.inputs[place]
            raise self.fail(f"input {place} must be a constant, got {name}, which is computed")
        return given

    def required(self, place: int) -> Array:
        """Return the constant that is an input; ValueError if it is omitted or computed."""
        value = self.constant(place)
        if value is None:
            raise self.fail(f"input {place} must be a constant, got none")
        return value

    def numbers(self, place: int) -> list[int]:
        """Return the integers of a constant."""
        value = self.required(place)
        if value.dtype.kind not in "iu" or value.ndim > 1:
            raise self.fail(f"input {place} must be a list of integers, got {value.dtype}")
        return [int(n) for n in value.reshape(-1)]

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute; numbers of float32 as the shortest decimals."""
        return self.node.get(attribute, default)

    def fail(self, problem: str) -> ValueError:
        """Return an error that names the node and its operator."""
        return self.node.fail(problem)

    def layer(self, layer: Layer, x: Value) -> Value:
        """Return the value of a layer that computes each element of an array."""
        return replace(x, source=self.applied(layer, x.source))

    def applied(self, layer: Layer, *sources: ModelArray) -> ModelArray:
        """Return the output of a layer without parameters."""
        nodes = [source.node for source in sources]
        return ModelArray(self.net.add(self.node.name, layer, *nodes))

    def along(
        self, layer: Layer, x: Value, node: GraphNode, atoms: Atoms, **arrays: Array
    ) -> Value:
        """Return the value of a layer of an array, whose result has the same axes.

        Parameters
        ----------
        layer : Layer
        x : Value
        node : GraphNode
            The array.
        atoms : tuple of Atom
            Of the array, if they are not in the order of `x`.
        **arrays : ndarray
            Parameters and statistics of the layer.
        """
        made = self.net.add(self.node.name, layer, node, arrays=arrays)
        return replace(x, source=ModelArray(made), atoms=atoms, name=self.node.name)

    def image(self, layer: Layer, *values: Value, **arrays: Array) -> Value:
        """Return the value of a layer of images or volumes."""
        nodes = [self.net.channels_last(x)[0] for x in values]
        made = self.net.add(self.node.name, layer, *nodes, arrays=arrays)
        return self.net.image(made, values[0].batch, self.node.name)


Read = Callable[[Reading], Any]


def plain(make: Callable[[Reading], Layer]) -> Read:
    """Return a function for an operator that computes each element."""
    return lambda at: at.layer(make(at), at.value())


def ordered(array: Array, order: Array | None) -> Array:
    """Return the entries of a vector in an order; None is that of the vector."""
    return array if order is None else array[order]


def resolved(at: Reading, x: Value, target: list[int]) -> list[int]:
    """Return a shape without 0 and -1."""
    zeros = at.get("allowzero", 0) and 0 in target
    if zeros or min(target, default=0) < -1 or target.count(-1) > 1:
        raise at.fail(f"expected positive sizes, 0 or one -1, got {target}")
    if any(n == 0 and i >= len(x.axes) for i, n in enumerate(target)):
        raise at.fail(f"sizes of 0 must be those of axes of {x.given}, got {target}")
    sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(target)]
    known, total = prod(n for n in sizes if n != -1), prod(x.shape)
    if total % known or (-1 not in sizes and total != known):
        raise at.fail(f"expected a shape of as many elements as {x.given}, got {target}")
    return [total // known if n == -1 else n for n in sizes]

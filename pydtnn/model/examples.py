"""Inputs for measurements, without a data set."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Shape
from pydtnn.layers.node import Node
from pydtnn.model.graph import Graph


def example_inputs(
    graph: Graph, shapes: tuple[Shape, ...], batch: int, rng: np.random.Generator
) -> tuple[Array, ...]:
    """Return random samples for each input of a network, see `example_input`."""
    return tuple(
        example_input(node, shape, batch, rng)
        for node, shape in zip(graph.inputs, shapes, strict=True)
    )


def example_input(node: Node, shape: Shape, batch: int, rng: np.random.Generator) -> Array:
    """Return random samples for an input of a network, on the host.

    Parameters
    ----------
    node : Node
        Of the input.
    shape : tuple of int
        Of one sample.
    batch : int
    rng : numpy.random.Generator

    Returns
    -------
    Array of float32, shape (batch, *shape)
        As the first layer that reads the input requires them, see `Layer.example`.
    """
    first = node.consumers[0] if node.consumers else node
    return first.layer.example((batch, *shape), rng)

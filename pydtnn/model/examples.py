"""Inputs for measurements, without a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Shape
from pydtnn.layers.node import Node
from pydtnn.model.graph import Graph


def example_inputs(
    graph: Graph,
    shapes: Sequence[Shape],
    batch: int,
    rng: np.random.Generator,
    reads: Sequence[int] | None = None,
) -> tuple[Array, ...]:
    """Return random samples for each input of a network, see `example_input`.

    Parameters
    ----------
    graph : Graph
        Its first inputs are those of the network that it reads; others are received.
    shapes : sequence of tuple of int
        Of one sample of each input of the network.
    batch : int
    rng : numpy.random.Generator
    reads : sequence of int, optional
        Numbers of the inputs that the graph, a stage of the network, reads. Default: all.
    """
    nodes = dict(zip(range(len(shapes)) if reads is None else reads, graph.inputs, strict=False))
    return tuple(
        example_input(nodes[i], shape, batch, rng)
        if i in nodes
        else rng.standard_normal((batch, *shape), np.float32)
        for i, shape in enumerate(shapes)
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

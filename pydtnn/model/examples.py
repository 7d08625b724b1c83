"""Inputs for measurements, without a data set."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Shape
from pydtnn.model.graph import Graph


def example_inputs(
    graph: Graph, shapes: tuple[Shape, ...], batch: int, rng: np.random.Generator
) -> tuple[Array, ...]:
    """Return random samples for each input of a network, on the host.

    Parameters
    ----------
    graph : Graph
    shapes : sequence of tuple of int
        Of one sample of each input.
    batch : int
    rng : numpy.random.Generator

    Returns
    -------
    tuple of Array of float32, shape (batch, *shape)
        As the first layer that reads an input requires them, see `Layer.example`.
    """
    return tuple(
        (node.consumers[0] if node.consumers else node).layer.example((batch, *shape), rng)
        for node, shape in zip(graph.inputs, shapes, strict=True)
    )

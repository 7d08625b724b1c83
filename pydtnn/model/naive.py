"""Forward and backward over a graph, written out: the reference of `pydtnn.model.execution`.

These loops keep every value until the end, and know nothing of fused layers, ranks, recomputation,
formats of numbers and reuse of memory. A model that was built with ``fuse=False``, in float32 or
float64, runs in them as in its own.

>>> import numpy as np
>>> from pydtnn import Model
>>> from pydtnn.layers import Linear, Sequential, Tanh
>>> model = Model(Sequential(Linear(4), Tanh(), Linear(2)), (3,), fuse=False)
>>> (y,), saved = forward(model.graph, [np.ones((5, 3), "float32")], StepContext(training=True))
>>> backward(model.graph, [np.ones_like(y)], saved)  # gradients of parameters are in model.buckets
[None]
"""

from __future__ import annotations

from collections.abc import Sequence

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, StepContext
from pydtnn.model.graph import Graph, Node


def forward(
    graph: Graph, xs: Sequence[Array], context: StepContext
) -> tuple[list[Array], dict[Node, Saved]]:
    """Run every layer after those that it reads.

    Parameters
    ----------
    graph : Graph
    xs : sequence of Array, shape ``(N, *input_shape)``
        One for each input of the model.
    context : StepContext

    Returns
    -------
    ys : list of Array, shape ``(N, *output_shape)``
        One for each output of the model.
    saved : dict of Node to object
        What the backward pass of each layer requires.
    """
    values = dict(zip(graph.inputs, xs, strict=True))
    saved = {}
    for node in graph.nodes[len(graph.inputs) :]:
        inputs = [values[source] for source in node.inputs]
        values[node], saved[node] = node.layer.forward(*inputs, context=context)
    return [values[node] for node in graph.outputs], saved


def backward(graph: Graph, dys: Sequence[Array], saved: dict[Node, Saved]) -> list[Array | None]:
    """Run the backward pass of every layer before those that it reads.

    Each layer writes the gradients of its parameters. The gradient of an array is the sum of those
    that the layers which read it return.

    Parameters
    ----------
    graph : Graph
    dys : sequence of Array, shape ``(N, *output_shape)``
        Gradient of the loss with respect to each output of the model.
    saved : dict of Node to object
        From `forward`.

    Returns
    -------
    list of Array or None
        Gradient of each input of the model; None unless it was built with ``input_gradient=True``.
    """
    gradients: dict[Node, Array] = {}

    def add(node: Node, gradient: Array | None) -> None:
        if gradient is not None:
            gradients[node] = gradients[node] + gradient if node in gradients else gradient

    for node, dy in zip(graph.outputs, dys, strict=True):
        add(node, dy)
    for node in reversed(graph.nodes[len(graph.inputs) :]):
        if node.index in graph.trained:  # parameters of this layer, or of one that it reads
            dxs = node.layer.backward(gradients.pop(node), saved[node])
            several = dxs if isinstance(dxs, tuple) else (dxs,)
            for source, dx in zip(node.inputs, several, strict=True):
                add(source, dx)
    return [gradients.get(node) for node in graph.inputs]

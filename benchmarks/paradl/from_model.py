"""ParaDL's list of layers of a model of this library."""

from __future__ import annotations

from benchmarks.paradl.layers import LayerList, LayerSize, Shape
from pydtnn.layers.activation import ReLU
from pydtnn.layers.base import Layer
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.linear import Linear
from pydtnn.layers.merge import Add
from pydtnn.layers.norm import BatchNorm
from pydtnn.layers.pool import AvgPool2d, GlobalAvgPool2d, MaxPool2d
from pydtnn.model import Model
from pydtnn.tools.perfmodel.compute import ComputeCosts, Label

KINDS: tuple[tuple[type[Layer], str], ...] = (
    (Conv2d, "CONV"),
    (Linear, "FC"),
    (MaxPool2d, "MPOOL"),
    (AvgPool2d, "APOOL"),
    (GlobalAvgPool2d, "APOOL"),
    (BatchNorm, "BNORM"),
    (ReLU, "RELU"),
    (Add, "ADD"),
    (Dropout, "DROPOUT"),
)
"""Kinds of layers, the first letters of their names."""

DIVIDED = (Conv2d, Linear)
"""Layers that model parallelism divides; the last linear layer stays whole."""


def layers_of(
    model: Model, samples: int, *, costs: ComputeCosts | None = None, batch: int = 1
) -> LayerList:
    """Return the list of layers of a model.

    Parameters
    ----------
    model : Model
        Of the whole network, constructed with ``fuse=False`` so that batch norms and activations
        are layers of their own.
    samples : int
        Samples of an epoch.
    costs : ComputeCosts, optional
        Times of the layers; by default they are 0.
    batch : int, default 1
        Samples of a rank for which the times are asked.
    """
    nodes = model.graph.nodes[len(model.graph.inputs) :]
    found = []
    last = max((n.index for n in nodes if isinstance(n.layer, Linear)), default=-1)
    for node in nodes:
        layer = node.layer
        kind = next((name for of, name in KINDS if isinstance(layer, of)), type(layer).__name__)
        forward, backward = (
            0.0 if costs is None else costs.seconds(Label(way, node.name), layer, batch) / batch
            for way in ("forward", "backward")
        )
        found.append(
            LayerSize(
                f"{kind} {node.name}",
                _channels_first(layer.input_shapes[0]),
                _weights(layer),
                _channels_first(layer.output_shape),
                forward,
                backward,
                split=isinstance(layer, DIVIDED) and node.index != last,
            )
        )
    return LayerList(type(model).__name__, samples, tuple(found))


def _channels_first(shape: Shape) -> Shape:
    return (*shape[-1:], *shape[:-1])


def _weights(layer: Layer) -> Shape:
    """Return channels, filters and kernel of a convolution or linear layer, or a number."""
    if isinstance(layer, Conv2d):
        filters, height, width, channels = layer.w.shape
        return (channels, filters, height, width)
    if isinstance(layer, Linear):
        features, inputs = layer.w.shape
        return (inputs, features)
    own = sum(p.size for p in layer.parameters if p.source is p)
    if isinstance(layer, MaxPool2d | AvgPool2d):
        return (0, 0, *layer.kernel)
    return (own,)

"""Operators of ONNX that compute each element of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from pydtnn import layers
from pydtnn.layers import Layer
from pydtnn.tools.interchange.onnx.functions import ACTIVATION, ACTIVATIONS, decimal
from pydtnn.tools.interchange.onnx.reading import Read, Reading, ordered, plain
from pydtnn.tools.interchange.onnx.views import ModelArray, Value

Array = np.ndarray


def _scalar(at: Reading, array: Array) -> float:
    if array.size != 1:
        raise at.fail(f"expected one number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def _arithmetic(at: Reading) -> Value:
    """Read Add, Sub, Mul and Div of two inputs."""
    a, b, *more = at.inputs
    if more:
        raise at.fail(f"expected two inputs, got {len(at.inputs)}")
    operator = at.node.operator
    if isinstance(a, Value) and isinstance(b, Value):
        if operator == "Div":
            raise at.fail("expected a constant divisor, got a computed one")
        if operator == "Mul":
            return _product(at, at.value(0), at.value(1))
        b = at.lazy(1)
        if operator == "Sub":
            b = replace(b, factor=-b.factor, name=f"{at.node.name}.minus")
        return _total(at, at.value(0), at.net.solid(b))
    first = isinstance(b, Value)
    constant, x = at.required(0 if first else 1), at.lazy(1 if first else 0)
    if constant.dtype.kind not in "fiu":
        raise at.fail(f"the constant must consist of numbers, got {constant.dtype}")
    constant = constant.astype("float64")
    if operator == "Sub" and first:
        x, operator = replace(x, factor=-x.factor), "Add"
    elif operator == "Sub":
        constant, operator = -constant, "Add"
    elif operator == "Div":
        if first or not constant.all():
            raise at.fail("expected constant divisors other than 0, got others")
        constant, operator = 1 / constant, "Mul"
    if constant.size > 1 or constant.ndim > len(x.axes):
        return with_constant(at, at.net.solid(x), constant, operator)
    number = float(constant.reshape(()))
    if operator == "Mul":
        return replace(x, factor=x.factor * number, name=at.node.name)
    size = x.source.node.shape[-1]
    source = _scaled(at, x.source, np.full(size, x.factor), np.full(size, number))
    return replace(x, source=source, factor=1.0, name=at.node.name)


def _total(at: Reading, *values: Value) -> Value:
    first, *others = values
    for other in others:
        first, *_ = at.net.aligned(first, other)
    nodes = [first.source.node] + [at.net.aligned(first, other)[2] for other in others]
    made = at.net.add(at.node.name, layers.Add(), *nodes)
    return replace(first, source=ModelArray(made), name=at.node.name)


def _sum(at: Reading) -> Value:
    values = [at.value(place) for place in range(len(at.inputs))]
    return replace(values[0], name=at.node.name) if len(values) == 1 else _total(at, *values)


def _product(at: Reading, a: Value, b: Value) -> Value:
    if a.shape == b.shape:
        x, *nodes = at.net.aligned(a, b)
        made = at.net.add(at.node.name, layers.Multiply(), *nodes)
        return replace(x, source=ModelArray(made), name=at.node.name)
    if len(a.axes) != len(b.axes):
        raise at.fail(f"inputs must have equally many axes, got {a.given} and {b.given}")
    if prod(b.shape) > prod(a.shape):
        a, b = b, a
    if len(a.axes) > 3:
        return at.image(layers.Multiply(), a, b)
    x, y = at.net.plain(a), at.net.plain(b)
    source = at.applied(layers.Multiply(), x.source, y.source)
    return replace(x, source=source, name=at.node.name)


def with_constant(at: Reading, x: Value, constant: Array, operator: str) -> Value:
    """Return the product with a factor of each channel, or the sum with terms of positions."""
    rank = len(x.axes)
    wide = (1,) * (rank - constant.ndim) + constant.shape
    if len(wide) != rank or any(
        n not in (1, size) or (n > 1 and x.batch in axis)
        for n, size, axis in zip(wide, x.shape, x.axes, strict=True)
    ):
        raise at.fail(f"the constant {constant.shape} must fit an input of shape {x.given}")
    constant = constant.reshape(wide)
    along = [axis for axis, n in enumerate(wide) if n > 1]
    if len(along) == 1:
        axis = along[0]
        node, atoms, order = at.net.last(x, x.axes[axis])
        vector = ordered(constant.reshape(-1), order)
        one = np.ones_like(vector)
        pair = (vector, None) if operator == "Mul" else (one, vector)
        source = _scaled(at, ModelArray(node), *pair)
        return replace(x, source=source, atoms=atoms, name=at.node.name)
    if operator == "Mul":
        raise at.fail(
            f"expected a number or a factor of each channel, got a constant of shape {wide}"
        )
    view = at.net.plain(x)
    terms = np.broadcast_to(constant, (1, *view.shape[1:])).reshape(-1, view.shape[-1])
    node = at.net.reshape(view.source.node, terms.shape, view.name)
    return at.along(layers.PositionalEmbedding(), view, node, view.atoms, w=terms)


def _scaled(at: Reading, source: ModelArray, factors: Array, terms: Array | None) -> ModelArray:
    """Return factors and terms of the last axis: a depthwise convolution of pixels."""
    node, channels = source.node, len(factors)
    before = prod(node.shape) // channels
    shape = node.shape if len(node.shape) == 3 else (before, 1, channels)
    layer = layers.Conv2d(channels, 1, groups=channels, bias=terms is not None)
    arrays = {"w": factors.reshape(channels, 1, 1, 1)}
    if terms is not None:
        arrays["b"] = terms
    wide = at.net.reshape(node, shape, f"{at.node.name}.pixels")
    return ModelArray(at.net.add(at.node.name, layer, wide, arrays=arrays))


def _prelu(at: Reading) -> Value:
    slope = at.required(1)
    slopes = np.unique(slope)
    if len(slopes) != 1 or not slopes[0] >= 0:
        raise at.fail("the slope must be one positive number or 0, got several or another one")
    return at.layer(_leaky(decimal(float(slopes[0]))), at.value())


def _leaky(alpha: float) -> Layer:
    return layers.LeakyReLU(alpha) if alpha else layers.ReLU()


def _gelu(at: Reading) -> Layer:
    return layers.GELU(at.get("approximate", "none"))


def _dropout(at: Reading) -> Value:
    training = at.constant(2)
    if any(at.node.outputs[1:2]) and at.node.outputs[1] in at.graph.readers:
        raise at.fail("expected a network that does not read the mask")
    if training is not None and training.any():
        raise at.fail("expected a network for inference, got training_mode=True; export it again")
    rate = at.constant(1)
    ratio = at.get("ratio", 0.5) if rate is None else decimal(_scalar(at, rate))
    return at.layer(layers.Dropout(ratio), at.value())


ELEMENTWISE: Mapping[str, Read] = {
    "Add": _arithmetic,
    "Atan": plain(lambda at: layers.ArcTan()),
    "Div": _arithmetic,
    "Dropout": _dropout,
    "Elu": plain(lambda at: layers.ELU(at.get("alpha", 1.0))),
    "Gelu": plain(_gelu),
    "HardSwish": plain(lambda at: layers.HardSwish()),
    "LeakyRelu": plain(lambda at: _leaky(at.get("alpha", 0.01))),
    "Log": plain(lambda at: layers.Log()),
    "Mul": _arithmetic,
    "Neg": lambda at: replace(at.lazy(), factor=-at.lazy().factor, name=at.node.name),
    "PRelu": _prelu,
    "Relu": plain(lambda at: layers.ReLU()),
    "Sigmoid": plain(lambda at: layers.Sigmoid()),
    "Softplus": plain(lambda at: layers.Softplus()),
    "Sub": _arithmetic,
    "Sum": _sum,
    "Tanh": plain(lambda at: layers.Tanh()),
    ACTIVATION: plain(lambda at: ACTIVATIONS[at.get(ACTIVATION, "")]()),
}
"""Functions of one array, and arithmetic of two."""

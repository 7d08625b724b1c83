"""Operators of ONNX that compute each element of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from pydtnn import layers
from pydtnn.layers import Layer
from pydtnn.tools.interchange.onnx.functions import decimal, erf, extended, solid
from pydtnn.tools.interchange.onnx.reading import Read, Reading, ordered, plain
from pydtnn.tools.interchange.onnx.views import ModelArray, Value

Array = np.ndarray


def _function(
    compute: Callable[..., Array],
    layer: Callable[[], Layer] | None = None,
    *,
    saturates: bool = False,
) -> Read:
    """Return a function for an operator that may be a part of an activation."""
    return lambda at: _computed(at, compute, at.lazy(), layer=layer, saturates=saturates)


def _computed(
    at: Reading,
    compute: Callable[..., Array],
    *values: Value,
    layer: Callable[[], Layer] | None = None,
    saturates: bool = False,
) -> Value:
    """Return a function of the elements of an array: a layer, or a part of an activation."""
    if layer is not None and not _in_activation(at):
        return at.layer(layer(), solid(at.net, *values))

    def last(*sources: ModelArray) -> ModelArray:
        if layer is None:
            raise at.fail("expected a part of an activation that pydtnn has, got another function")
        return at.applied(layer(), *sources)

    return extended(at.net, values, compute, last, at.node.name, saturates=saturates)


def _in_activation(at: Reading) -> bool:
    """Return whether a function may be a part of an activation that several nodes compute."""
    if any(isinstance(x, Value) and x.function is not None for x in at.inputs):
        return True
    joined = {"Sigmoid": "Mul", "HardSigmoid": "Mul", "Softplus": "Where"}.get(at.node.operator)
    return any(
        reader.operator == joined
        and not any(isinstance(at.values.get(name), np.ndarray) for name in reader.inputs)
        for reader in at.graph.readers.get(at.node.outputs[0], ())
    )


def _clip(at: Reading) -> Value:
    bounds = [at.constant(place) for place in (1, 2)]
    low, high = [
        at.get(name, None) if bound is None else decimal(_scalar(at, bound))
        for name, bound in zip(("min", "max"), bounds, strict=True)
    ]
    return _clipped(at, at.lazy(), low, high)


def _clipped(at: Reading, x: Value, low: float | None, high: float | None) -> Value:
    infinite = np.finfo("float32").max  # the default bounds of opset 6
    low = None if low is not None and low <= -infinite else low
    high = None if high is not None and high >= infinite else high
    bounds = (-np.inf if low is None else low, np.inf if high is None else high)

    def layer() -> Layer:
        if low != 0 or high not in (None, 6):
            raise at.fail(f"bounds must be 0 and 6, or 0 alone, got {low} and {high}")
        return layers.ReLU() if high is None else layers.ReLU6()

    return _computed(at, lambda v: np.clip(v, *bounds), x, layer=layer, saturates=True)


def _scalar(at: Reading, array: Array) -> float:
    if array.size != 1:
        raise at.fail(f"expected one number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def _extreme(at: Reading) -> Value:
    """Read Max or Min of a value and a number."""
    constants = [c for c in at.inputs if isinstance(c, np.ndarray)]
    values = [i for i, x in enumerate(at.inputs) if isinstance(x, Value)]
    if len(constants) != 1 or len(values) != 1:
        raise at.fail("expected an input and a number")
    number = decimal(_scalar(at, constants[0]))
    pair = (number, None) if at.node.operator == "Max" else (None, number)
    return _clipped(at, at.lazy(values[0]), *pair)


def _power(at: Reading) -> Value:
    exponent = _scalar(at, at.required(1))
    return _computed(at, lambda v: v**exponent, at.lazy())


def _arithmetic(at: Reading) -> Value:
    """Read Add, Sub, Mul and Div of two inputs."""
    a, b, *more = at.inputs
    if more:
        raise at.fail(f"expected two inputs, got {len(at.inputs)}")
    if isinstance(a, Value) and isinstance(b, Value):
        return _of_two(at, at.lazy(0), at.lazy(1))
    place = 0 if isinstance(a, Value) else 1
    constant, x = at.required(1 - place), at.lazy(place)
    operator = at.node.operator
    if constant.dtype.kind not in "fiu":
        raise at.fail(f"the constant must consist of numbers, got {constant.dtype}")
    if constant.size == 1 and constant.ndim <= len(x.axes):
        return _with_number(at, x, float(constant.reshape(())), first=place == 1)
    if operator == "Sub" and place == 1:
        x, operator = _with_number(at, x, -1.0, first=False, operator="Mul"), "Add"
    elif operator == "Sub":
        constant, operator = -constant, "Add"
    elif operator == "Div" and place == 0:
        with np.errstate(all="ignore"):
            constant, operator = (1 / constant.astype("float64")), "Mul"
    if operator == "Div":
        raise at.fail("expected a computed dividend, got a constant that is divided")
    return with_constant(at, solid(at.net, x), constant, operator)


NUMERIC: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}


def _with_number(
    at: Reading, x: Value, number: float, *, first: bool, operator: str | None = None
) -> Value:
    """Return a function of each element and a number, which is the first operand or the second."""
    operator = operator or at.node.operator
    compute = NUMERIC[operator]

    def function(v: Array) -> Array:
        return compute(number, v) if first else compute(v, number)

    def last(source: ModelArray) -> ModelArray:
        if operator in ("Add", "Sub"):
            sign = -1.0 if operator == "Sub" and first else 1.0
            term = -number if operator == "Sub" and not first else number
            size = (source.node.shape[-1],)
            return _scaled(at, source, np.full(size, sign), np.full(size, term))
        factor = 1 / number if operator == "Div" and number else number
        if operator == "Div" and (first or not number):
            raise at.fail(f"expected a divisor other than 0, got a quotient with {number}")
        return at.applied(layers.Rescale(decimal(factor)), source)

    return extended(at.net, (x,), function, last, at.node.name)


def _of_two(at: Reading, a: Value, b: Value) -> Value:
    operator, compute = at.node.operator, NUMERIC[at.node.operator]
    if a.source is b.source and a.axes == b.axes and a.atoms == b.atoms:

        def last(x: ModelArray, y: ModelArray) -> ModelArray:
            if operator == "Div":
                raise at.fail("expected a constant divisor, got a computed one")
            if operator == "Sub":
                y = _negative(at, y)
            return at.applied(layers.Multiply() if operator == "Mul" else layers.Add(), x, y)

        return extended(at.net, (a, b), compute, last, at.node.name)
    a, b = solid(at.net, a), solid(at.net, b)
    if operator == "Div":
        raise at.fail("expected a constant divisor, got a computed one")
    if operator == "Mul":
        return _product(at, a, b)
    if operator == "Sub":
        b = replace(b, source=_negative(at, b.source))
    return _total(at, a, b)


def _negative(at: Reading, source: ModelArray) -> ModelArray:
    return ModelArray(at.net.add(f"{at.node.name}.minus", layers.Rescale(-1.0), source.node))


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


def _hard_sigmoid(at: Reading) -> Value:
    alpha, beta = at.get("alpha", 0.2), at.get("beta", 0.5)

    def layer() -> Layer:
        if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
            raise at.fail(f"alpha and beta must be 1/6 and 1/2, got {alpha} and {beta}")
        return layers.HardSigmoid()

    def compute(v: Array) -> Array:
        return np.clip(alpha * v + beta, 0, 1)

    return _computed(at, compute, at.lazy(), layer=layer, saturates=True)


def _greater(at: Reading) -> Value:
    number = _scalar(at, at.required(1))
    return _computed(at, lambda v: v > number, at.lazy())


def _where(at: Reading) -> Value:
    """Read a choice between functions of the same array, such as of Softplus above a threshold."""
    values = tuple(at.lazy(place) for place in range(3))
    if len({(v.source, v.axes, v.atoms) for v in values}) > 1:
        raise at.fail("expected a part of an activation, got values of several arrays")
    return _computed(at, np.where, *values)


def _sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


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
    "Clip": _clip,
    "Div": _arithmetic,
    "Dropout": _dropout,
    "Elu": plain(lambda at: layers.ELU(at.get("alpha", 1.0))),
    "Erf": _function(erf, saturates=True),
    "Gelu": plain(_gelu),
    "Greater": _greater,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": plain(lambda at: layers.HardSwish()),
    "LeakyRelu": plain(lambda at: _leaky(at.get("alpha", 0.01))),
    "Log": plain(lambda at: layers.Log()),
    "Max": _extreme,
    "Min": _extreme,
    "Mul": _arithmetic,
    "Neg": _function(np.negative),
    "PRelu": _prelu,
    "Pow": _power,
    "Relu": plain(lambda at: layers.ReLU()),
    "Sigmoid": _function(_sigmoid, layers.Sigmoid, saturates=True),
    "Softplus": _function(lambda v: np.logaddexp(v, 0), layers.Softplus, saturates=True),
    "Sub": _arithmetic,
    "Sum": _sum,
    "Tanh": _function(np.tanh, layers.Tanh, saturates=True),
    "Where": _where,
}
"""Functions of one array, and arithmetic of two."""

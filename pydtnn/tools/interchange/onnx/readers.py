"""Operators of ONNX as layers.

A function reads one node: it returns the value of its output, or those of several outputs, and has
added the layers that compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.tools.interchange.onnx.elementwise import ELEMENTWISE
from pydtnn.tools.interchange.onnx.graph import ANY_BATCH, axes_of, slices_of
from pydtnn.tools.interchange.onnx.norms import NORMS
from pydtnn.tools.interchange.onnx.reading import Read, Reading, Repeated, resolved
from pydtnn.tools.interchange.onnx.views import Atom, Value, size_of
from pydtnn.tools.interchange.onnx.windows import WINDOWS

Array = np.ndarray


# -- products with matrices


def _gemm(at: Reading) -> Value:
    if at.get("transA", 0):
        raise at.fail("transA must be 0, got 1")
    weight, bias = at.required(1), at.constant(2)
    if weight.ndim != 2:
        raise at.fail(f"expected a matrix, got {weight.shape}")
    weight = weight if at.get("transB", 0) else weight.T
    alpha, beta = at.get("alpha", 1.0), at.get("beta", 1.0)
    if alpha != 1:
        weight = weight * weight.dtype.type(alpha)
    if bias is not None:
        bias = _vector(at, bias, len(weight))
        bias = bias if beta == 1 else bias * bias.dtype.type(beta)
    x = at.value()
    if len(x.axes) != 2:
        raise at.fail(f"expected features (N, C), got an input of shape {x.given}")
    return linear(at, x, weight, bias, at.node.name)


def _vector(at: Reading, bias: Array, features: int) -> Array:
    """Return a bias of each feature."""
    if bias.shape not in ((), (1,), (features,), (1, 1), (1, features)):
        raise at.fail(
            f"the bias must have a number for each of the {features} outputs, got {bias.shape}"
        )
    return np.broadcast_to(bias.reshape(-1), (features,))


def linear(at: Reading, x: Value, weight: Array, bias: Array | None, name: str) -> Value:
    """Return the product of the last axis with a matrix (O, I)."""
    last = x.axes[x.sample_axis(-1)]
    if size_of(last) != weight.shape[1]:
        raise at.fail(f"the matrix {weight.shape} must fit an input of shape {x.given}")
    node, atoms, order = at.net.last(x, last)
    arrays = {"w": weight if order is None else weight[:, order]}
    if bias is not None:
        arrays["b"] = bias
    layer = layers.Linear(len(weight), bias=bias is not None)
    made = at.net.add(name, layer, node, arrays=arrays)
    before = atoms[: len(atoms) - len(last)]
    return at.net.features(made, replace(x, name=name), before, x.axes[:-1])


# -- views


def _view(function: Callable[[Reading, Value], Value]) -> Read:
    """Return a function for an operator that only changes the axes of its input."""

    def read(at: Reading) -> Value:
        x = at.inputs[0]
        if not isinstance(x, Value):
            raise at.fail("input 0 must be computed, got a constant or none")
        return replace(function(at, x), name=at.node.name)

    return read


def _flatten(at: Reading, x: Value) -> Value:
    axis = at.get("axis", 1)
    if axis != len(x.axes):
        axis = x.axis(axis)
    return at.net.reshaped(x, [prod(x.shape[:axis]), prod(x.shape[axis:])])


def _reshape(at: Reading, x: Value) -> Value:
    return at.net.reshaped(x, resolved(at, x, at.numbers(1)))


def _depth_to_space(at: Reading, x: Value) -> Value:
    """Read channels that become blocks of pixels."""
    b, (n, c, h, w) = at.get("blocksize", 1), x.shape
    if at.get("mode", "DCR") != "CRD" or c % b**2:
        raise at.fail(f"mode must be CRD, and channels whole blocks, got {x.given}")
    view = at.net.reshaped(x, [n, c // b**2, b, b, h, w]).transposed([0, 1, 4, 2, 5, 3])
    return at.net.reshaped(view, [n, c // b**2, h * b, w * b])


def _transpose(at: Reading, x: Value) -> Value:
    return x.transposed(at.get("perm", [*range(len(x.axes))][::-1]))


def _squeeze(at: Reading, x: Value) -> Value:
    given = axes_of(at.node, at.inputs)
    if given is None:
        given = [i for i, axis in enumerate(x.axes) if size_of(axis) == 1]
    axes = {x.axis(axis) for axis in given}
    if any(x.axes[axis] for axis in axes):
        raise at.fail(f"axes must have a size of 1 and not be that of the batch, got {given}")
    return replace(x, axes=tuple(axis for i, axis in enumerate(x.axes) if i not in axes))


def _unsqueeze(at: Reading, x: Value) -> Value:
    axes = axes_of(at.node, at.inputs) or []
    rank = len(x.axes) + len(axes)
    places = {axis % rank for axis in axes if -rank <= axis < rank}
    if len(places) != len(axes):
        raise at.fail(f"axes must be different ones of {rank}, got {axes}")
    rest = iter(x.axes)
    return replace(x, axes=tuple(() if i in places else next(rest) for i in range(rank)))


def _cast(at: Reading, x: Value) -> Value:
    from onnx.helper import tensor_dtype_to_np_dtype  # installed: it has parsed the file

    kind = tensor_dtype_to_np_dtype(at.get("to", 1))
    if kind.kind == "f" and kind.itemsize >= 4:
        return replace(x, integer=False)
    readers = {node.operator for node in at.graph.readers.get(at.node.outputs[0], ())}
    if kind.kind == "i" and readers <= {"GRU", "LSTM"}:  # lengths, which the layer checks
        return x
    if kind.kind != "i" or kind.itemsize < 4 or not x.integer:
        raise at.fail(f"expected float32 or float64, or integers that stay ones, got {kind}")
    return x


# -- parts and sums of parts


def _slice(at: Reading) -> Value:
    x = _any(at)
    constants = [at.constant(place) for place in range(1, len(at.inputs))]
    if any(c is not None and c.dtype.kind not in "iu" for c in constants):
        raise at.fail("starts, ends, axes and steps must be integers")
    for axis, start, stop, step in zip(*slices_of(at.node, constants), strict=True):
        place = x.axis(axis)
        size = x.shape[place]
        if step < 1:
            raise at.fail(f"steps must be positive, got {step}")
        start, stop, _ = slice(start, stop, step).indices(size)
        if x.batch in x.axes[place] or (place == 0 and x.axes[0] == x.batch_axis):
            if (start, stop, step) != (0, size, 1):
                raise at.fail("the axis must not be that of the batch")
            continue
        x = at.net.part(x, place, start, stop, step)
    return replace(x, name=at.node.name)


def _any(at: Reading) -> Value:
    """Return a computed input of any type."""
    given = at.inputs[0]
    return given if isinstance(given, Value) and given.integer else at.value()


def _split(at: Reading) -> list[Value]:
    x = at.value()
    axis, outputs = x.sample_axis(at.get("axis", 0)), len(at.node.outputs)
    size = x.shape[axis]
    given = at.get("split", None) if at.graph.opset < 13 else at.constant(1)
    if given is None:
        each = -(-size // outputs)
        sizes = [min(each, size - i * each) for i in range(outputs)]
    else:
        sizes = [int(n) for n in np.asarray(given).reshape(-1)]
    if len(sizes) != outputs or sum(sizes) != size or min(sizes) < 1:
        raise at.fail(f"expected parts of the axis of size {size}, got {sizes!s:.80}")
    stops = np.cumsum(sizes).tolist()
    return [
        replace(at.net.part(replace(x, name=at.node.name), axis, stop - n, stop), name=at.node.name)
        for n, stop in zip(sizes, stops, strict=True)
    ]


def _concat(at: Reading) -> Value:
    if not all(isinstance(x, Value) for x in at.inputs):
        return _class_token(at)
    values = [at.value(place) for place in range(len(at.inputs))]
    first = values[0]
    if len({len(x.axes) for x in values}) > 1:
        raise at.fail(
            f"inputs must have equally many axes, got {' and '.join(x.given for x in values)}"
        )
    axis = first.sample_axis(at.get("axis", 1))
    if len(first.axes) > 3:
        ours = len(first.axes) - 2 if axis == 1 else axis - 2
        return at.image(layers.Concat(ours), *values)
    order = [*range(len(first.axes))]
    if first.batch_axis in first.axes:  # that of states (D, N, H) is the second
        order.insert(0, order.pop(first.axes.index(first.batch_axis)))
    plain = [at.net.plain(x.transposed(order)) for x in values]
    ours = order.index(axis) - 1
    made = at.net.add(at.node.name, layers.Concat(ours), *(x.source.node for x in plain))
    y = replace(at.net.in_order(made, plain[0]), name=at.node.name)
    return y.transposed(np.argsort(order).tolist())


def _class_token(at: Reading) -> Value:
    """Read a constant position before a sequence."""
    token, x = at.inputs if len(at.inputs) == 2 else (None, None)
    fixed = isinstance(x, Value) and x.batch.size == 1
    array: Any = token if fixed else None
    if isinstance(token, Repeated):
        array = token.array if token.axis == 0 else None
    if array is None or not isinstance(x, Value) or len(x.axes) != 3:
        raise at.fail(
            "expected computed inputs, or a constant position before a sequence (N, T, C)"
        )
    x = at.net.plain(at.value(1))
    _, length, features = x.shape
    if x.sample_axis(at.get("axis", 1)) != 1 or array.shape != (1, 1, features):
        raise at.fail(
            f"expected a constant position (1, 1, {features}) before a sequence, got {array.shape}"
        )
    node = at.net.reshape(x.source.node, (length, features), x.name)
    arrays = {"token": array.reshape(-1)}
    made = at.net.add(at.node.name, layers.ClassToken(), node, arrays=arrays)
    first = (Atom(length + 1),)
    return at.net.features(made, replace(x, name=at.node.name), first, (x.axes[0], first))


def _pad(at: Reading) -> Value:
    given, value, axes = at.numbers(1), at.constant(2), at.constant(3)
    if at.get("mode", "constant") != "constant":
        raise at.fail(f"mode must be constant, got {at.get('mode', 'constant')}")
    if value is not None and np.any(np.asarray(value)):
        raise at.fail(f"the value must be 0, got {value}")
    x = at.value()
    x.check_samples()
    places = [*range(len(x.axes))] if axes is None else [x.axis(int(a)) for a in axes.reshape(-1)]
    if len(given) != 2 * len(places) or min(given, default=0) < 0:
        raise at.fail(f"pads must be pairs of axes that are not negative, got {given}")
    pairs = [(0, 0)] * len(x.axes)
    for i, place in enumerate(places):
        pairs[place] = (given[i], given[i + len(places)])
    if pairs[0] != (0, 0):
        raise at.fail(f"pads must be those of samples, got {pairs[0]} for the batch")
    _, *sample = pairs
    if set(sample) <= {(0, 0)}:
        return x
    if len(x.axes) > 3:
        return at.image(layers.Pad((*sample[1:], sample[0])), x)
    plain = at.net.plain(x)
    made = at.net.add(at.node.name, layers.Pad(tuple(sample)), plain.source.node)
    return replace(at.net.in_order(made, plain), name=at.node.name)


def _expand(at: Reading) -> Repeated:
    """Read an expansion of a constant to as many rows as a batch."""
    shape, array = at.numbers(1), at.required(0)
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    fits = [n in (1, m) for n, m in zip(shape[1:], array.shape[1:], strict=False)]
    if shape[:1] != [ANY_BATCH] or array.shape[0] != 1 or len(shape) != array.ndim or not all(fits):
        raise at.fail(f"expected a row for each sample, got the shape {shape}")
    return Repeated(array)


OPERATORS: Mapping[str, Read] = {
    **ELEMENTWISE,
    **NORMS,
    **WINDOWS,
    "Cast": _view(_cast),
    "Concat": _concat,
    "DepthToSpace": _view(_depth_to_space),
    "Expand": _expand,
    "Flatten": _view(_flatten),
    "Gemm": _gemm,
    "Identity": _view(lambda at, x: x),
    "Pad": _pad,
    "Reshape": _view(_reshape),
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _view(_squeeze),
    "Transpose": _view(_transpose),
    "Unsqueeze": _view(_unsqueeze),
}
"""Functions that read an operator of images, features and positions."""

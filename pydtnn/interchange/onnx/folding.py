"""Operators of ONNX whose inputs are constants: mostly shapes, which exporters compute by nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from pydtnn.interchange.onnx.graph import Node

Array = np.ndarray
Fold = Callable[[Node, Sequence[Any]], Array]

MAX_ELEMENTS = 2**24
"""Elements of a result that is larger than its inputs."""


def fold(node: Node, inputs: Sequence[Array | None]) -> Array:
    """Return what a node computes from constants.

    Raises
    ------
    ValueError
        If the inputs do not suit the operator, or the result would be too large.
    """
    try:
        with np.errstate(all="ignore"):
            return np.asarray(FOLDS[node.operator](node, inputs))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:80]
        raise node.fail(f"the inputs do not suit the operator ({reason})") from error


def axes_of(node: Node, inputs: Sequence[Any]) -> list[int] | None:
    """Return the axes of an operator that has them as an attribute, or since opset 13 as input."""
    given = node.get("axes", None)
    if given is None and len(inputs) > 1 and inputs[1] is not None:
        return [int(axis) for axis in np.asarray(inputs[1]).reshape(-1)]
    return None if given is None else list(given)


def _bounded(*shape: int) -> tuple[int, ...]:
    if prod(max(int(n), 0) for n in shape) > MAX_ELEMENTS:
        raise ValueError(f"expected at most {MAX_ELEMENTS} elements, got {shape}")
    return tuple(map(int, shape))


def _binary(function: Callable[[Array, Array], Array]) -> Fold:
    def compute(node: Node, inputs: Sequence[Any]) -> Array:
        a, b = inputs
        _bounded(*np.broadcast_shapes(a.shape, b.shape))
        return function(a, b)

    return compute


def _unary(function: Callable[[Array], Array]) -> Fold:
    return lambda node, inputs: function(inputs[0])


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        if not b.all():
            raise ValueError("division by 0")
        return (a // b) if (a >= 0).all() and (b > 0).all() else np.trunc(a / b).astype(a.dtype)
    return a / b


def _mod(node: Node, inputs: Sequence[Any]) -> Array:
    a, b = inputs
    if a.dtype.kind in "iu" and not b.all():
        raise ValueError("division by 0")
    return _binary(np.fmod if node.get("fmod", 0) else np.mod)(node, inputs)


def _unsqueeze(node: Node, inputs: Sequence[Any]) -> Array:
    axes = axes_of(node, inputs) or []
    rank = inputs[0].ndim + len(axes)
    return np.expand_dims(inputs[0], tuple(axis + rank if axis < 0 else axis for axis in axes))


def _squeeze(node: Node, inputs: Sequence[Any]) -> Array:
    axes = axes_of(node, inputs)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _reshape(node: Node, inputs: Sequence[Any]) -> Array:
    data, target = inputs
    sizes = [data.shape[i] if n == 0 else int(n) for i, n in enumerate(target.tolist())]
    return data.reshape(sizes)


def _slice(node: Node, inputs: Sequence[Any]) -> Array:
    data, *rest = inputs
    cuts = [slice(None)] * data.ndim
    for axis, *cut in zip(*slices_of(node, rest), strict=True):
        cuts[axis] = slice(*cut)
    return data[tuple(cuts)]


def slices_of(node: Node, inputs: Sequence[Any]) -> tuple[list[int], ...]:
    """Return axes, starts, ends and steps of a node Slice; `inputs` are those after the data."""
    if not inputs:
        starts, ends = list(node.get("starts", ())), list(node.get("ends", ()))
        given: list[Any] = [node.get("axes", None), None]
    else:
        starts, ends = (np.asarray(part).reshape(-1).tolist() for part in inputs[:2])
        given = [None if p is None else p.reshape(-1).tolist() for p in (*inputs[2:], None, None)]
    axes, steps = given[0] or [*range(len(starts))], given[1] or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise node.fail(f"starts, ends, axes and steps must be equally many, got {axes}")
    return axes, starts, ends, steps


def _expand(node: Node, inputs: Sequence[Any]) -> Array:
    data, shape = inputs
    wanted = np.broadcast_shapes(data.shape, tuple(map(int, shape)))
    return np.broadcast_to(data, _bounded(*wanted))


def _constant_of_shape(node: Node, inputs: Sequence[Any]) -> Array:
    value = node.attributes.get("value")
    filled: Any = np.float32(0)
    if value is not None:
        from onnx.numpy_helper import to_array  # installed: it has parsed the file

        filled = to_array(value).reshape(())
    return np.broadcast_to(filled, _bounded(*inputs[0].tolist()))


def _cast(node: Node, inputs: Sequence[Any]) -> Array:
    from onnx.helper import tensor_dtype_to_np_dtype

    return inputs[0].astype(tensor_dtype_to_np_dtype(node.get("to", 1)))


def _range(node: Node, inputs: Sequence[Any]) -> Array:
    start, stop, step = (part.reshape(()).item() for part in inputs)
    count = max(-int(-(stop - start) // step), 0)
    return (start + step * np.arange(*_bounded(count))).astype(inputs[0].dtype)


def _where(node: Node, inputs: Sequence[Any]) -> Array:
    _bounded(*np.broadcast_shapes(*(part.shape for part in inputs)))
    return np.where(*inputs)


def _trilu(node: Node, inputs: Sequence[Any]) -> Array:
    k = int(inputs[1].reshape(())) if len(inputs) > 1 and inputs[1] is not None else 0
    return np.triu(inputs[0], k) if node.get("upper", 1) else np.tril(inputs[0], k)


def _gather(node: Node, inputs: Sequence[Any]) -> Array:
    data, indices = inputs
    axis = node.get("axis", 0)
    _bounded(data.size // max(data.shape[axis], 1), indices.size)
    return np.take(data, indices, axis)


def _concat(node: Node, inputs: Sequence[Any]) -> Array:
    _bounded(sum(part.size for part in inputs))
    return np.concatenate(inputs, node.get("axis", 0))


FOLDS: Mapping[str, Fold] = {
    "Add": _binary(np.add),
    "And": _binary(np.logical_and),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _binary(_divide),
    "Equal": _binary(np.equal),
    "Expand": _expand,
    "Floor": _unary(np.floor),
    "Gather": _gather,
    "Greater": _binary(np.greater),
    "Identity": _unary(np.asarray),
    "Less": _binary(np.less),
    "LessOrEqual": _binary(np.less_equal),
    "Max": _binary(np.maximum),
    "Min": _binary(np.minimum),
    "Mod": _mod,
    "Mul": _binary(np.multiply),
    "Neg": _unary(np.negative),
    "Not": _unary(np.logical_not),
    "Range": _range,
    "Reciprocal": _unary(np.reciprocal),
    "Reshape": _reshape,
    "Shape": _unary(lambda x: np.array(x.shape, np.int64)),
    "Slice": _slice,
    "Sqrt": _unary(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(np.subtract),
    "Transpose": lambda node, inputs: np.transpose(inputs[0], node.get("perm", None)),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
"""Functions of operators that are computed if all inputs are constants."""

"""Layers as operators of ONNX, for inference.

Images are (N, C, H, W) and features (N, C). A function adds the nodes of one layer; the last one
has the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.interchange.onnx.draft import Draft, channels_first
from pydtnn.layers import Layer
from pydtnn.layers.base import Shape
from pydtnn.layers.window import resolve_padding


@dataclass(frozen=True, eq=False)
class Place:
    """A layer in a network.

    Attributes
    ----------
    name : str
    layer : Layer
        As constructed, without arrays.
    inputs : list of str
    shapes : list of tuple of int
        Of the inputs, without the batch axis and with the channels last.
    shape : tuple of int
        Of the output.
    arrays : dict of str to ndarray
        Parameters and running statistics in ONNX's layout, by PyTorch's names.
    reordered : bool
        Whether the features of the inputs are in another order than in ONNX.
    """

    name: str
    layer: Any
    inputs: list[str]
    shapes: list[Shape]
    shape: Shape
    arrays: Mapping[str, np.ndarray]
    reordered: bool

    def require(self, fits: bool, expected: str) -> None:
        """Raise ValueError if the layer is used in a way that is not supported."""
        if not fits:
            given = " and ".join(map(str, self.shapes))
            raise ValueError(
                f"{self.name}: {type(self.layer).__name__} must have {expected} to be exported, "
                f"got an input of shape {given}"
            )


Write = Callable[[Draft, Place], None]


def _plain(operator: str, *attributes: str) -> Write:
    """Return a function for a layer that is one operator, with attributes of the same name."""

    def write(draft: Draft, at: Place) -> None:
        values = {name: getattr(at.layer, name) for name in attributes}
        draft.node(operator, at.inputs, at.name, **values)

    return write


def _conv(draft: Draft, at: Place) -> None:
    layer, (image,) = at.layer, at.shapes
    inputs = [*at.inputs, *(draft.constant(f"{at.name}.{k}", a) for k, a in at.arrays.items())]
    draft.node(
        "Conv",
        inputs,
        at.name,
        dilations=layer.dilation,
        group=layer.groups,
        **_window(layer, image, layer.dilation),
    )


def _window(layer: Any, image: Shape, dilation: tuple[int, ...]) -> dict[str, Any]:
    """Return the attributes of a convolution or pooling of an image (H, W, C)."""
    pairs = resolve_padding(
        layer.padding, image[:-1], layer.kernel, layer.stride, dilation, type(layer).__name__
    )
    before, after = zip(*pairs, strict=True)
    return {"kernel_shape": layer.kernel, "strides": layer.stride, "pads": [*before, *after]}


def _linear(draft: Draft, at: Place) -> None:
    at.require(len(at.shapes[0]) == 1, "features (N, C)")
    constants = [draft.constant(f"{at.name}.{k}", array) for k, array in at.arrays.items()]
    draft.node("Gemm", [*at.inputs, *constants], at.name, transB=1)


def _batch_norm(draft: Draft, at: Place) -> None:
    names = ("weight", "bias", "running_mean", "running_var")
    constants = [draft.constant(f"{at.name}.{name}", at.arrays[name]) for name in names]
    layer = at.layer
    draft.node(
        "BatchNormalization",
        [*at.inputs, *constants],
        at.name,
        epsilon=layer.epsilon,
        momentum=1 - layer.momentum,
    )


def _relu6(draft: Draft, at: Place) -> None:
    bounds = [draft.constant(f"{at.name}.{name}", value) for name, value in _BOUNDS.items()]
    draft.node("Clip", [*at.inputs, *bounds], at.name)


_BOUNDS = {"min": 0.0, "max": 6.0}


def _silu(draft: Draft, at: Place) -> None:
    gate = draft.node("Sigmoid", at.inputs, f"{at.name}.gate")
    draft.node("Mul", [*at.inputs, gate], at.name)


def _gelu(draft: Draft, at: Place) -> None:
    """Write ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``."""
    (x,), name = at.inputs, at.name
    numbers = {"three": 3.0, "cubic": 0.044715, "scale": sqrt(2 / pi), "one": 1.0, "half": 0.5}
    three, cubic, scale, one, half = [
        draft.constant(f"{name}.{key}", value) for key, value in numbers.items()
    ]
    cube = draft.node("Pow", [x, three], f"{name}.cube")
    term = draft.node("Mul", [cube, cubic], f"{name}.term")
    total = draft.node("Add", [x, term], f"{name}.sum")
    scaled = draft.node("Mul", [total, scale], f"{name}.scaled")
    tanh = draft.node("Tanh", [scaled], f"{name}.tanh")
    factor = draft.node("Add", [tanh, one], f"{name}.factor")
    halved = draft.node("Mul", [x, half], f"{name}.halved")
    draft.node("Mul", [halved, factor], name)


def _softmax(draft: Draft, at: Place) -> None:
    draft.node("Softmax", at.inputs, at.name, axis=_axis(-1, at.shape))


def _dropout(draft: Draft, at: Place) -> None:
    """Write the operator, which does nothing in inference, so that the rate is not lost."""
    draft.node("Dropout", [*at.inputs, draft.constant(f"{at.name}.ratio", at.layer.rate)], at.name)


def _add(draft: Draft, at: Place) -> None:
    draft.node("Add" if len(at.inputs) == 2 else "Sum", at.inputs, at.name)


def _concat(draft: Draft, at: Place) -> None:
    draft.node("Concat", at.inputs, at.name, axis=_axis(at.layer.axis, at.shape))


def _axis(axis: int, shape: Shape) -> int:
    """Return the axis of a batch in ONNX for that of a sample."""
    axis %= len(shape)
    return (2, 3, 1)[axis] if len(shape) == 3 else axis + 1


def _max_pool(draft: Draft, at: Place) -> None:
    draft.node("MaxPool", at.inputs, at.name, **_window(at.layer, at.shapes[0], (1, 1)))


def _avg_pool(draft: Draft, at: Place) -> None:
    draft.node(
        "AveragePool",
        at.inputs,
        at.name,
        count_include_pad=int(at.layer.count_padding),
        **_window(at.layer, at.shapes[0], (1, 1)),
    )


def _global_pool(draft: Draft, at: Place) -> None:
    pooled = draft.node("GlobalAveragePool", at.inputs, f"{at.name}.pooled")
    draft.node("Flatten", [pooled], at.name)


def _adaptive_pool(draft: Draft, at: Place) -> None:
    """Write one pooling if all bins are equal, or else a product with a matrix for each axis."""
    *size, _ = at.shapes[0]
    if at.layer.output == (1, 1):
        draft.node("GlobalAveragePool", at.inputs, at.name)
        return
    if all(n % o == 0 for n, o in zip(size, at.layer.output, strict=True)):
        window = [n // o for n, o in zip(size, at.layer.output, strict=True)]
        draft.node("AveragePool", at.inputs, at.name, kernel_shape=window, strides=window)
        return
    rows, columns = [_means(n, o) for n, o in zip(size, at.layer.output, strict=True)]
    left = draft.constant(f"{at.name}.rows", rows)
    right = draft.constant(f"{at.name}.columns", columns.T)
    first = draft.node("MatMul", [left, *at.inputs], f"{at.name}.by_rows")
    draft.node("MatMul", [first, right], at.name)


def _means(size: int, bins: int) -> np.ndarray:
    """Return the matrix (bins, size) that averages the bins of `AdaptiveAvgPool2d`."""
    matrix = np.zeros((bins, size))
    for i in range(bins):
        start, stop = i * size // bins, -(-(i + 1) * size // bins)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def _flatten(draft: Draft, at: Place) -> None:
    at.require(len(at.shape) == 1, "features (N, C) as its output")
    draft.node("Flatten", at.inputs, at.name)


def _pad(draft: Draft, at: Place) -> None:
    at.require(not at.reordered, "features in the order of ONNX")
    before, after = zip(*channels_first(at.layer.padding), strict=True)
    amounts = draft.constant(f"{at.name}.pads", [0, *before, 0, *after])
    draft.node("Pad", [*at.inputs, amounts], at.name)


def _slice(draft: Draft, at: Place) -> None:
    at.require(not at.reordered, "features in the order of ONNX")
    (source,) = at.shapes
    given = (*at.layer.slices, *(slice(None) for _ in source))
    cuts = [cut.indices(n) for cut, n in zip(given, source, strict=False)]
    starts, ends, steps = zip(*cuts, strict=True)
    axes = [_axis(axis, source) for axis in range(len(cuts))]
    columns = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    constants = [draft.constant(f"{at.name}.{key}", column) for key, column in columns.items()]
    draft.node("Slice", [*at.inputs, *constants], at.name)


WRITERS: Mapping[type[Layer], Write] = {
    layers.AdaptiveAvgPool2d: _adaptive_pool,
    layers.Add: _add,
    layers.ArcTan: _plain("Atan"),
    layers.AvgPool2d: _avg_pool,
    layers.BatchNorm: _batch_norm,
    layers.Concat: _concat,
    layers.Conv2d: _conv,
    layers.Dropout: _dropout,
    layers.ELU: _plain("Elu", "alpha"),
    layers.Flatten: _flatten,
    layers.GELU: _gelu,
    layers.GlobalAvgPool2d: _global_pool,
    layers.Identity: _plain("Identity"),
    layers.LeakyReLU: _plain("LeakyRelu", "alpha"),
    layers.Linear: _linear,
    layers.Log: _plain("Log"),
    layers.MaxPool2d: _max_pool,
    layers.Pad: _pad,
    layers.ReLU: _plain("Relu"),
    layers.ReLU6: _relu6,
    layers.SiLU: _silu,
    layers.Sigmoid: _plain("Sigmoid"),
    layers.Slice: _slice,
    layers.Softmax: _softmax,
    layers.Tanh: _plain("Tanh"),
}
"""Functions that write a layer; others cannot be exported."""

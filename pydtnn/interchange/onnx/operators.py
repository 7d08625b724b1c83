"""Layers as operators of ONNX, for inference.

Images are (N, C, H, W), volumes (N, C, D, H, W) and features (N, C). A function adds the nodes of
one layer; the last one has the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import pi, sqrt
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.interchange.onnx import sequences
from pydtnn.interchange.onnx.draft import Draft, channels_first
from pydtnn.interchange.onnx.place import Place
from pydtnn.layers import Layer
from pydtnn.layers.base import Shape
from pydtnn.layers.window import resolve_padding

Write = Callable[[Draft, Place], None]


def _plain(operator: str, *attributes: str) -> Write:
    """Return a function for a layer that is one operator, with attributes of the same name."""

    def write(draft: Draft, at: Place) -> None:
        values = {name: getattr(at.layer, name) for name in attributes}
        draft.node(operator, at.inputs, at.name, **values)

    return write


def _filters(operator: str, *attributes: str) -> Write:
    """Return a function for a convolution, with further attributes of the same name."""

    def write(draft: Draft, at: Place) -> None:
        layer, (image,) = at.layer, at.shapes
        constants = [draft.constant(f"{at.name}.{k}", array) for k, array in at.arrays.items()]
        draft.node(
            operator,
            [*at.inputs, *constants],
            at.name,
            dilations=layer.dilation,
            group=layer.groups,
            **{name: getattr(layer, name) for name in attributes},
            **_window(layer, image, layer.dilation),
        )

    return write


def _window(layer: Any, image: Shape, dilation: tuple[int, ...]) -> dict[str, Any]:
    """Return the attributes of a convolution or pooling of an image (H, W, C)."""
    pairs = resolve_padding(
        layer.padding, image[:-1], layer.kernel, layer.stride, dilation, type(layer).__name__
    )
    before, after = zip(*pairs, strict=True)
    return {"kernel_shape": layer.kernel, "strides": layer.stride, "pads": [*before, *after]}


def _upsample(draft: Draft, at: Place) -> None:
    """Write pixels that are repeated, or interpolated between their centres."""
    empty = draft.constant(f"{at.name}.roi", np.zeros(0))
    scales = draft.constant(f"{at.name}.scales", [1.0, 1.0, *map(float, at.layer.factor)])
    nearest = at.layer.mode == "nearest"
    options = {"nearest_mode": "floor"} if nearest else {}
    draft.node(
        "Resize",
        [*at.inputs, empty, scales],
        at.name,
        mode="nearest" if nearest else "linear",
        coordinate_transformation_mode="asymmetric" if nearest else "half_pixel",
        **options,
    )


def _linear(draft: Draft, at: Place) -> None:
    if len(at.shapes[0]) > 1:
        _with_last(draft, at, sequences.positions)
        return
    constants = [draft.constant(f"{at.name}.{k}", array) for k, array in at.arrays.items()]
    draft.node("Gemm", [*at.inputs, *constants], at.name, transB=1)


def _with_last(draft: Draft, at: Place, write: Write) -> None:
    """Write a layer of the last axis, with an image transposed to (N, H, W, C) and back."""
    rank = len(at.shape)
    if rank < 3:
        write(draft, at)
        return
    perm = [0, *range(2, rank + 1), 1]
    x = draft.node("Transpose", at.inputs, f"{at.name}.last", perm=perm)
    write(draft, replace(at, inputs=[x], output=f"{at.name}.made"))
    draft.node("Transpose", [f"{at.name}.made"], at.name, name=f"{at.name}.back", perm=_back(rank))


def _back(rank: int) -> list[int]:
    """Return the axes of (N, H, W, C) in the order (N, C, H, W)."""
    return [0, rank, *range(1, rank)]


def _with_second(draft: Draft, at: Place, write: Write) -> None:
    """Write a layer of ONNX's second axis, with a sequence transposed to (N, C, T) and back."""
    if len(at.shape) != 2:
        write(draft, at)
        return
    x = draft.node("Transpose", at.inputs, f"{at.name}.second", perm=[0, 2, 1])
    write(draft, replace(at, inputs=[x], output=f"{at.name}.made", shape=at.shape[::-1]))
    draft.node("Transpose", [f"{at.name}.made"], at.name, name=f"{at.name}.back", perm=[0, 2, 1])


def _batch_norm(draft: Draft, at: Place) -> None:
    names = ("weight", "bias", "running_mean", "running_var")
    constants = [draft.constant(f"{at.name}.{name}", at.arrays[name]) for name in names]
    layer = at.layer
    draft.node(
        "BatchNormalization",
        [*at.inputs, *constants],
        at.output,
        name=at.name,
        epsilon=layer.epsilon,
        momentum=1 - layer.momentum,
    )


def _layer_norm(draft: Draft, at: Place) -> None:
    """Write the norm of all axes of an image in the order of ONNX, or of the last ones here."""
    shape, axes = at.shapes[0], at.layer.axes
    if axes == len(shape):
        _last_axes(draft, at, channels_first(shape))
    else:
        _with_last(draft, at, lambda draft, at: _last_axes(draft, at, shape[-axes:]))


def _last_axes(draft: Draft, at: Place, shape: Shape) -> None:
    constants = [draft.constant(f"{at.name}.{k}", a.reshape(shape)) for k, a in at.arrays.items()]
    draft.node(
        "LayerNormalization",
        [*at.inputs, *constants],
        at.output,
        name=at.name,
        axis=-len(shape),
        epsilon=at.layer.epsilon,
    )


def _group_norm(draft: Draft, at: Place) -> None:
    """Write the norm of each group as an instance norm, and factors and terms of channels."""
    at.require(not at.reordered, "features of ONNX's order")
    layer, name = at.layer, at.name
    channels, *size = channels_first(at.shape) if len(at.shape) != 2 else at.shape
    groups = draft.constant(f"{name}.groups", [0, layer.groups, -1])
    rows = draft.node("Reshape", [*at.inputs, groups], f"{name}.rows")
    plain = [
        draft.constant(f"{name}.{what}", np.full(layer.groups, value))
        for what, value in (("ones", 1.0), ("zeros", 0.0))
    ]
    normed = draft.node(
        "InstanceNormalization", [rows, *plain], f"{name}.normed", epsilon=layer.epsilon
    )
    back = draft.constant(f"{name}.shape", [0, channels, *size])
    image = draft.node("Reshape", [normed, back], f"{name}.image")
    weight, bias = [
        draft.constant(f"{name}.{k}", at.arrays[k].reshape(channels, *(1 for _ in size)))
        for k in ("weight", "bias")
    ]
    scaled = draft.node("Mul", [image, weight], f"{name}.scaled")
    draft.node("Add", [scaled, bias], at.output, name=name)


def _local_response_norm(draft: Draft, at: Place) -> None:
    layer = at.layer
    at.require(layer.size % 2 == 1, "an odd size")
    at.require(len(at.shape) >= 3, "an image")
    draft.node(
        "LRN",
        at.inputs,
        at.name,
        size=layer.size,
        alpha=layer.alpha,
        beta=layer.beta,
        bias=layer.k,
    )


def _rescale(draft: Draft, at: Place) -> None:
    factor = draft.constant(f"{at.name}.value", at.layer.factor)
    draft.node("Mul", [*at.inputs, factor], at.name)


def _relu6(draft: Draft, at: Place) -> None:
    bounds = [draft.constant(f"{at.name}.{name}", value) for name, value in _BOUNDS.items()]
    draft.node("Clip", [*at.inputs, *bounds], at.name)


_BOUNDS = {"min": 0.0, "max": 6.0}


def _silu(draft: Draft, at: Place) -> None:
    gate = draft.node("Sigmoid", at.inputs, f"{at.name}.gate")
    draft.node("Mul", [*at.inputs, gate], at.name)


def _hard_sigmoid(draft: Draft, at: Place) -> None:
    draft.node("HardSigmoid", at.inputs, at.name, alpha=1 / 6, beta=0.5)


def _cubic(draft: Draft, at: Place) -> str:
    """Write ``x + 0.044715 x^3``."""
    (x,), name = at.inputs, at.name
    three, cubic = (
        draft.constant(f"{name}.{key}", value)
        for key, value in {"three": 3.0, "cubic": 0.044715}.items()
    )
    cube = draft.node("Pow", [x, three], f"{name}.cube")
    term = draft.node("Mul", [cube, cubic], f"{name}.term")
    return draft.node("Add", [x, term], f"{name}.sum")


def _gelu(draft: Draft, at: Place) -> None:
    """Write ``x / 2 (1 + erf(x / sqrt(2)))``, or ``tanh(sqrt(2 / pi) (x + 0.044715 x^3))``."""
    (x,), name = at.inputs, at.name
    exact = at.layer.approximate == "none"
    numbers = {"scale": sqrt(1 / 2 if exact else 2 / pi), "one": 1.0, "half": 0.5}
    scale, one, half = [draft.constant(f"{name}.{key}", value) for key, value in numbers.items()]
    scaled = draft.node("Mul", [x if exact else _cubic(draft, at), scale], f"{name}.scaled")
    odd = draft.node("Erf" if exact else "Tanh", [scaled], f"{name}.odd")
    factor = draft.node("Add", [odd, one], f"{name}.factor")
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
    if len(shape) < 3:
        return axis + 1
    return 1 if axis == len(shape) - 1 else axis + 2


def _max_pool(draft: Draft, at: Place) -> None:
    draft.node(
        "MaxPool", at.inputs, at.name, **_window(at.layer, at.shapes[0], (1,) * at.layer.axes)
    )


def _avg_pool(draft: Draft, at: Place) -> None:
    draft.node(
        "AveragePool",
        at.inputs,
        at.name,
        count_include_pad=int(at.layer.count_padding),
        **_window(at.layer, at.shapes[0], (1,) * at.layer.axes),
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
    rows, columns = [means_of_bins(n, o) for n, o in zip(size, at.layer.output, strict=True)]
    left = draft.constant(f"{at.name}.rows", rows)
    right = draft.constant(f"{at.name}.columns", columns.T)
    first = draft.node("MatMul", [left, *at.inputs], f"{at.name}.by_rows")
    draft.node("MatMul", [first, right], at.name)


def means_of_bins(size: int, bins: int) -> np.ndarray:
    """Return the matrix (bins, size) that averages the bins of `AdaptiveAvgPool2d`."""
    matrix = np.zeros((bins, size))
    for i in range(bins):
        start, stop = i * size // bins, -(-(i + 1) * size // bins)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def _reshape(draft: Draft, at: Place) -> None:
    """Write features of images in the order of ONNX, and others in the order of pydtnn."""
    (source,), shape, (x,) = at.shapes, at.shape, at.inputs
    if len(shape) == 1:
        draft.node("Flatten", [x], at.name)
        return
    at.require(not at.reordered, "features in the order of ONNX")
    if len(source) >= 3:
        axes = range(len(source))
        perm = [0, *(i + 2 for i in axes[:-1]), 1]
        x = draft.node("Transpose", [x], f"{at.name}.last", perm=perm)
    target = draft.constant(f"{at.name}.shape", [0, *shape])
    if len(shape) < 3:
        draft.node("Reshape", [x, target], at.name)
        return
    x = draft.node("Reshape", [x, target], f"{at.name}.reshaped")
    draft.node("Transpose", [x], at.name, perm=_back(len(shape)))


def _transpose(draft: Draft, at: Place) -> None:
    perm = [0] * (len(at.shape) + 1)
    for i, axis in enumerate(at.layer.axes):
        perm[_axis(i, at.shape)] = _axis(axis, at.shape)
    draft.node("Transpose", at.inputs, at.name, perm=perm)


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
    layers.AvgPool3d: _avg_pool,
    layers.BatchNorm: lambda draft, at: _with_second(draft, at, _batch_norm),
    layers.ClassToken: sequences.class_token,
    layers.Concat: _concat,
    layers.Conv2d: _filters("Conv"),
    layers.Conv3d: _filters("Conv"),
    layers.ConvTranspose2d: _filters("ConvTranspose", "output_padding"),
    layers.DotProductAttention: sequences.attention,
    layers.Dropout: _dropout,
    layers.ELU: _plain("Elu", "alpha"),
    layers.Embedding: sequences.embedding,
    layers.Flatten: _reshape,
    layers.GELU: _gelu,
    layers.GlobalAvgPool2d: _global_pool,
    layers.GlobalAvgPool3d: _global_pool,
    layers.GroupNorm: lambda draft, at: _with_second(draft, at, _group_norm),
    layers.HardSigmoid: _hard_sigmoid,
    layers.HardSwish: _plain("HardSwish"),
    layers.Identity: _plain("Identity"),
    layers.LayerNorm: _layer_norm,
    layers.LeakyReLU: _plain("LeakyRelu", "alpha"),
    layers.Linear: _linear,
    layers.LocalResponseNorm: _local_response_norm,
    layers.Log: _plain("Log"),
    layers.MaxPool2d: _max_pool,
    layers.MaxPool3d: _max_pool,
    layers.Multiply: _plain("Mul"),
    layers.Pad: _pad,
    layers.PositionalEmbedding: sequences.positional_embedding,
    layers.ReLU6: _relu6,
    layers.ReLU: _plain("Relu"),
    layers.Rescale: _rescale,
    layers.Reshape: _reshape,
    layers.SiLU: _silu,
    layers.Sigmoid: _plain("Sigmoid"),
    layers.Slice: _slice,
    layers.Softmax: _softmax,
    layers.Tanh: _plain("Tanh"),
    layers.Transpose: _transpose,
    layers.Upsample: _upsample,
}
"""Functions that write a layer; others cannot be exported."""

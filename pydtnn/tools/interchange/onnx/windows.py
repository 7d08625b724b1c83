"""Operators of ONNX with windows that slide over signals, images and volumes; means of axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import isclose, prod
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.layers import Layer
from pydtnn.tools.interchange.onnx.graph import MAX_ELEMENTS, axes_of
from pydtnn.tools.interchange.onnx.reading import Read, Reading
from pydtnn.tools.interchange.onnx.views import ModelArray, Value, size_of

Array = np.ndarray


def _window(at: Reading, size: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Return stride, dilation and padding of a convolution or pooling of an image."""
    axes, automatic = len(size), at.get("auto_pad", "NOTSET")
    stride = tuple(at.get("strides", (1,) * axes))
    dilation = tuple(at.get("dilations", (1,) * axes))
    pads = list(at.get("pads", (0,) * (2 * axes)))
    if (
        axes not in (1, 2, 3)
        or not len(kernel) == len(stride) == len(dilation) == len(pads) / 2 == axes
        or min(*kernel, *stride, *dilation) < 1
        or min(pads) < 0
        or automatic not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
        or (automatic != "NOTSET" and any(pads))
    ):
        raise at.fail(
            "kernel, strides and dilations must be positive numbers of one to three axes, and pads "
            f"not negative or auto_pad, got {tuple(kernel)}, {stride}, {dilation}, {tuple(pads)} "
            f"and {automatic}"
        )
    pairs = [*zip(pads[:axes], pads[axes:], strict=True)]
    if automatic.startswith("SAME"):
        pairs = []
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
            total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if automatic == "SAME_UPPER" else (more, less))
    return {"stride": stride, "dilation": dilation, "padding": tuple(pairs)}


def _filters(at: Reading) -> tuple[Array, dict[str, Array]]:
    """Return the filters of a convolution, channels last, and its arrays."""
    weight, bias = at.required(1), at.constant(2)
    kernel = tuple(at.get("kernel_shape", weight.shape[2:]))
    if weight.ndim not in (3, 4, 5) or kernel != weight.shape[2:]:
        raise at.fail(
            "filters must be (O, C, k), (O, C, kh, kw) or (O, C, kd, kh, kw) of kernel_shape, got "
            f"{weight.shape} and {kernel}"
        )
    arrays = {"w": np.moveaxis(weight, 1, -1)}
    return weight, arrays if bias is None else arrays | {"b": bias}


def _conv(at: Reading) -> Value:
    x, (weight, arrays) = at.value(), _filters(at)
    groups = at.get("group", 1)
    node, order = at.net.channels_last(x, any_order=groups == 1)
    bias = at.constant(2) is not None
    options = _window(at, node.shape[:-1], weight.shape[2:])
    if order is not None:
        if arrays["w"].shape[-1] != len(order):
            raise at.fail(f"filters {weight.shape} must have the channels of {x.given}")
        arrays["w"] = arrays["w"][..., order]
    fields = [d * (k - 1) + 1 for d, k in zip(options["dilation"], weight.shape[2:], strict=True)]
    if any(max(pair) >= n for pair, n in zip(options["padding"], fields, strict=True)):
        pad = layers.Pad((*options.pop("padding"), (0, 0)))
        node = at.net.add(f"{at.node.name}.pad", pad, node)
    layer = CONVOLUTIONS[weight.ndim - 2](
        len(weight), weight.shape[2:], groups=groups, bias=bias, **options
    )
    made = at.net.add(at.node.name, layer, node, arrays=arrays)
    return at.net.image(made, x.batch, at.node.name)


def _conv_transpose(at: Reading) -> Value:
    x, (weight, arrays) = at.value(), _filters(at)
    automatic, groups = at.get("auto_pad", "NOTSET"), at.get("group", 1)
    if (
        weight.ndim != 4
        or automatic not in ("NOTSET", "VALID")
        or "output_shape" in at.node.attributes
    ):
        raise at.fail(
            "expected images, pads, and no output_shape, got filters of shape "
            f"{weight.shape} and auto_pad {automatic}"
        )
    options = _window(at, x.shape[2:], weight.shape[2:])
    more, pads = at.get("output_padding", (0, 0)), options["padding"]
    kept = [min(n, after) for n, (_, after) in zip(more, pads, strict=True)]  # not cut off instead
    options["padding"] = tuple((pad[0], pad[1] - n) for pad, n in zip(pads, kept, strict=True))
    left = np.subtract(more, kept)
    layer = layers.ConvTranspose2d(
        weight.shape[1] * groups,
        weight.shape[2:],
        output_padding=tuple(left.tolist()),
        groups=groups,
        bias="b" in arrays,
        **options,
    )
    return at.image(layer, x, **arrays)


CONVOLUTIONS: dict[int, Any] = {1: layers.Conv1d, 2: layers.Conv2d, 3: layers.Conv3d}

POOLS: dict[tuple[str, int], Any] = {
    ("MaxPool", 1): layers.MaxPool1d,
    ("AveragePool", 1): layers.AvgPool1d,
    ("MaxPool", 2): layers.MaxPool2d,
    ("MaxPool", 3): layers.MaxPool3d,
    ("AveragePool", 2): layers.AvgPool2d,
    ("AveragePool", 3): layers.AvgPool3d,
}


def _pool(at: Reading) -> Value:
    x, kernel = at.value(), tuple(at.get("kernel_shape", ()))
    size = x.shape[2:]
    options = _window(at, size, kernel)
    if {*options.pop("dilation")} != {1}:
        raise at.fail(f"dilations must be 1, got {at.get('dilations', ())}")
    if at.node.operator == "AveragePool":
        options["count_padding"] = bool(at.get("count_include_pad", 0))
    if at.get("ceil_mode", 0) and at.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        _reach_the_end(at, size, kernel, options)
    return at.image(POOLS[at.node.operator, len(kernel)](kernel, **options), x)


def _reach_the_end(
    at: Reading, size: Sequence[int], kernel: Sequence[int], options: dict[str, Any]
) -> None:
    """Extend the padding to the end of a last window, which starts within the image."""
    pairs, given = [], options["padding"]
    for n, k, s, (before, after) in zip(size, kernel, options["stride"], given, strict=True):
        more = (k - n - before - after) % s
        pairs.append((before, after + more if after + more < k else after))
    if tuple(pairs) == given:
        return
    if options.get("count_padding") and any(map(any, given)):
        raise at.fail("ceil_mode must be 0 if pads count and windows do not divide the input")
    options["padding"] = tuple(pairs)
    if "count_padding" in options:
        options["count_padding"] = False


MEANS: dict[int, Any] = {
    2: layers.GlobalAvgPool1d,
    3: layers.GlobalAvgPool2d,
    4: layers.GlobalAvgPool3d,
}
"""Means of all positions, by the axes of a sample."""


def _reduced(at: Reading, x: Value) -> list[int]:
    """Return the axes that a reduction or a global pooling reduces."""
    pool = at.node.operator.startswith("Global")
    axes: Sequence[int] | None = range(2, len(x.axes)) if pool else axes_of(at.node, at.inputs)
    if not axes and not pool and not at.get("noop_with_empty_axes", 0):
        axes = range(len(x.axes))
    return sorted({x.sample_axis(axis) for axis in axes or ()})


def _means(at: Reading) -> Value:
    """Read means over positions of an image, or of a sequence."""
    x = at.value()
    reduced = _reduced(at, x)
    gone = [atom in {a for axis in reduced for a in x.axes[axis]} for atom in x.atoms]
    others = tuple(atom for atom, out in zip(x.atoms, gone, strict=True) if not out)
    source = x.source
    if any(gone):
        first, count = gone.index(True), sum(gone)
        size, before = prod(x.shape[axis] for axis in reduced), size_of(x.atoms[:first])
        after = size_of(others) // before
        node = source.node
        pooled = _pooled_axis(node.shape, before, size, after)
        if pooled is not None:
            layer: Layer = layers.AdaptiveAvgPool2d(pooled)
        elif not all(gone[first : first + count]):
            order = sorted(x.atoms, key=lambda atom: atom in others)
            before, after = 1, size_of(others)
            node = at.net.arrange(x, order, (size, after))
        elif before > 1 or len(node.shape) not in MEANS or node.shape[-1] != after:
            shape = (before, size, after) if before > 1 else (size, after)
            node = at.net.reshape(node, shape, f"{at.node.name}.positions")
        if pooled is None:
            whole = MEANS[len(node.shape)]
            layer = whole() if before == 1 else layers.AdaptiveAvgPool2d((before, 1))
        source = ModelArray(at.net.add(at.node.name, layer, node))
    keep = at.get("keepdims", 1)
    kept = [(i, axis) for i, axis in enumerate(x.axes) if keep or i not in reduced]
    made = tuple(() if i in reduced else axis for i, axis in kept)
    return replace(x, source=source, atoms=others, axes=made, name=at.node.name)


def _pooled_axis(
    shape: tuple[int, ...], before: int, size: int, after: int
) -> tuple[int, int] | None:
    """Return the bins of an image of which one of two axes is averaged, None for other arrays."""
    if len(shape) != 3 or 1 in shape[:2]:
        return None
    height, width, channels = shape
    if (before, size, after) == (1, height, width * channels):
        return 1, width
    return (height, 1) if (before, size, after) == shape else None


def _maxima(at: Reading) -> Value:
    """Read the largest elements along axes: a pooling of all of them."""
    x = at.value()
    reduced = _reduced(at, x)
    if not reduced:
        return x
    others = [i for i in range(1, len(x.axes)) if i not in reduced]
    size, rest = (prod(x.shape[i] for i in group) for group in (reduced, others))
    view = at.net.reshaped(x.transposed([0, *others, *reduced]), [x.shape[0], rest, size])
    kept = {*range(len(x.axes))} if at.get("keepdims", 1) else {0, *others}
    made = [1 if i in reduced else n for i, n in enumerate(x.shape) if i in kept]
    return at.net.reshaped(at.image(layers.MaxPool1d(size), view), made)


def _resize(at: Reading) -> Value:
    x = at.value()
    x.check_samples()
    scales, sizes = at.constant(2), at.constant(3)
    axes = [x.axis(axis) for axis in at.get("axes", range(len(x.axes)))]
    factors = [1.0] * len(x.axes)
    given = scales if scales is not None and scales.size else sizes
    if given is None or given.size != len(axes):
        raise at.fail("expected scales or sizes of all axes")
    for axis, number in zip(axes, given.reshape(-1).tolist(), strict=True):
        factors[axis] = number if given is scales else number / x.shape[axis]
    made = [(n, n * factor) for n, factor in zip(x.shape[2:], factors[2:], strict=True)]
    ratios = [Fraction(int(np.float32(m)), n) if 1 <= m < MAX_ELEMENTS else 0 for n, m in made]
    whole = all(isclose(n * r, m, rel_tol=1e-6) for r, (n, m) in zip(ratios, made, strict=True))
    if len(ratios) != 2 or factors[:2] != [1, 1] or not whole:
        raise at.fail(f"expected a whole height and width of an image, got factors {factors}")
    mode, where = at.get("mode", "nearest"), "coordinate_transformation_mode"
    place = at.get(where, "half_pixel")
    rounding = at.get("nearest_mode", "round_prefer_floor")
    centres = all(r >= 1 or m > 1 for r, (_, m) in zip(ratios, made, strict=True))
    usual = "half_pixel" if place == "pytorch_half_pixel" and centres else place
    start = STARTS.get((mode, usual, "" if mode == "linear" else rounding))
    stretches = at.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    if start is None or at.get("antialias", 0) or not stretches:
        raise at.fail(
            "expected nearest pixels of whole blocks, or linear interpolation of pixels with "
            f"half_pixel, got mode {mode}, {where} {place} and nearest_mode {rounding}"
        )
    factor = (ratios[0].numerator, ratios[1].numerator)
    if prod(x.shape[1:]) * prod(factor) > MAX_ELEMENTS:  # before the layer makes filters
        raise at.fail(f"outputs of samples must have at most {MAX_ELEMENTS} elements")
    if factor != (1, 1):
        x = at.image(layers.Upsample(factor, "nearest" if mode == "nearest" else "bilinear"), x)
    for axis, ratio in enumerate(ratios, start=2):
        if (step := ratio.denominator) > 1:  # a row or column of each, or the mean of two
            kernel, stride = [1, 1], [1, 1]
            kernel[axis - 2], stride[axis - 2] = 1 + (mode == "linear" and step % 2 == 0), step
            x = at.net.part(x, axis, start(step), x.shape[axis])
            x = at.image(layers.AvgPool2d(tuple(kernel), stride=tuple(stride)), x)
    return x


STARTS: Mapping[tuple[str, str, str], Callable[[int], int]] = {
    ("nearest", "asymmetric", "floor"): lambda step: 0,
    ("nearest", "half_pixel", "round_prefer_floor"): lambda step: (step - 1) // 2,
    ("nearest", "half_pixel", "round_prefer_ceil"): lambda step: step // 2,
    ("linear", "half_pixel", ""): lambda step: (step - 1) // 2,
}
"""First of the rows or columns of an enlarged image that have a distance, by the options."""

WINDOWS: Mapping[str, Read] = {
    "AveragePool": _pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": _means,
    "MaxPool": _pool,
    "ReduceMax": _maxima,
    "ReduceMean": _means,
    "Resize": _resize,
    "adaptive_avg_pool2d": lambda at: at.image(
        layers.AdaptiveAvgPool2d(tuple(at.get("output_size", ()))), at.value()
    ),
}
"""Convolutions, pools and changes of the size of images."""

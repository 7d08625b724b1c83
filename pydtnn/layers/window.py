"""Layers with windows: options (kernel, stride, padding, dilation) and shapes of inputs."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.geometry import Pairs
from pydtnn.layers.base import Layer, Shape

Padding = int | str | tuple[int, ...] | tuple[tuple[int, int], ...]
"""An int, one int or one (before, after) pair per axis, "same" or "valid"."""

AXES = {1: ("L",), 2: ("H", "W"), 3: ("D", "H", "W")}
"""Names of the axes of signals, images and volumes."""


def resolve_padding(
    padding: Padding,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    who: str,
) -> Pairs:
    """Expand padding to ``(before, after)`` per axis and check that it fits.

    "same" gives an output of ``ceil(size / stride)``, with the odd zero after; "valid" gives none.

    Raises
    ------
    ValueError
        If the padding is malformed, negative, not smaller than the kernel's extent, or the kernel
        larger than the padded input.
    """
    axes = len(size)
    extent = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [
            max((-(-n // s) - 1) * s + e - n, 0)
            for n, s, e in zip(size, stride, extent, strict=True)
        ]
        pairs: Pairs = tuple((t // 2, t - t // 2) for t in totals)
    else:
        pairs = _pairs(padding, axes, who)
    for n, e, k, (before, after) in zip(size, extent, kernel, pairs, strict=True):
        if max(before, after) >= e and max(before, after) > 0:
            keep = f"; use padding={(e - 1) // 2} to keep the size" if e > 1 else "; use padding=0"
            raise ValueError(
                f"{who}: padding must be smaller than kernel {e}, got {max(before, after)}{keep}"
            )
        if e > n + before + after:
            raise ValueError(
                f"{who}: kernel {k} must have an extent of at most the padded input "
                f"{n + before + after}, got {e}; use a smaller kernel or more padding"
            )
    return pairs


def _pairs(padding: Any, axes: int, who: str) -> Pairs:
    error = ValueError(
        f"{who}: padding must be an int, {axes} ints, {axes} (before, after) pairs, "
        f'"same" or "valid", got {padding!r}'
    )
    each = padding if isinstance(padding, tuple | list) else (padding,) * axes
    pairs = [p if isinstance(p, tuple | list) else (p, p) for p in each]
    if len(pairs) != axes or any(len(p) != 2 for p in pairs):
        raise error
    if not all(isinstance(v, int) and v >= 0 for pair in pairs for v in pair):
        raise error
    return tuple((before, after) for before, after in pairs)


def split_shape(layer: Layer, shapes: tuple[Shape, ...], axes: int) -> tuple[Shape, int]:
    """Return the size and the channels of the only input, a map with so many spatial axes.

    Raises
    ------
    ValueError
        If there are several inputs, or another number of axes.
    """
    shape = layer.single(shapes)
    if len(shape) != axes + 1:
        expected = ", ".join((*AXES[axes], "C"))
        raise layer.fail(f"expected an input of shape ({expected}), got {shape}")
    return shape[:-1], shape[-1]

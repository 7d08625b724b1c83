"""Enlargement of images."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext, as_tuple
from pydtnn.layers.cost import Cost
from pydtnn.layers.window import split_shape
from pydtnn.utils.names import unknown

MODES = ("nearest", "bilinear")


class Upsample(Layer):
    """Enlarge images by integer factors.

    "nearest" repeats pixels. "bilinear" interpolates between their centres: output ``o`` along an
    axis lies at ``(o + 1/2) / factor - 1/2`` of the input, clamped to its first and last pixel, as
    in PyTorch without ``align_corners``.

    Both are transposed depthwise convolutions with constant filters, by the same kernels as other
    depthwise ones: of ones, and of a triangle along each axis. Outputs beyond the centres of the
    outer pixels get only a part of the triangle's weights, by whose sum they are divided.

    Parameters
    ----------
    factor : int or pair
    mode : {"nearest", "bilinear"}

    Notes
    -----
    Input ``(N, H, W, C)``, output ``(N, factor H, factor W, C)``. Plans cut it by channels.
    """

    saves = ()
    new_results = RESULTS

    def __init__(
        self,
        factor: int | tuple[int, int],
        mode: Literal["nearest", "bilinear"] = "nearest",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.factor = as_tuple(factor, 2, type(self).__name__, "factor")
        if mode not in MODES:
            raise self.fail(unknown("mode", str(mode), MODES))
        self.mode = mode

    def build(self, *shapes: Shape) -> Shape:
        """Make the filters of the depthwise convolution whose transpose this is."""
        size, channels = split_shape(self, shapes, 2)
        output = tuple(n * f for n, f in zip(size, self.factor, strict=True))
        sides = [_taps(f, self.mode) for f in self.factor]
        borders = [_border(f, self.mode) for f in self.factor]
        kernel, padding = map(len, sides), ((len(border), len(border)) for border in borders)
        window = output, tuple(kernel), self.factor, tuple(padding), (1, 1)
        self.geometry = ConvGeometry.shared(*window, channels, channels, channels)
        filters = np.broadcast_to(np.outer(*sides)[..., None], self.geometry.weight_shape)
        self.w = self.backend.asarray(filters, self.dtype)
        self.borders = [self.backend.asarray(border, self.dtype) for border in borders]
        return (*output, channels)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Scatter the filters; divide at the borders by the sums of their weights."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        self.backend.conv.backward_data(x, self.w, self.geometry, out=y)
        self._divide(y)
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Divide in the same way; correlate with the filters."""
        if any(map(len, self.borders)):
            dy = dy.copy()
            self._divide(dy)
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.conv.forward(dy, self.w, None, self.geometry, out=dx)
        return dx

    def _divide(self, y: Array) -> None:
        """Divide the outer rows and columns by the sums of the weights that they get, in place."""
        for axis, border in enumerate(self.borders, start=1):
            n = len(border)
            rows = (slice(None),) * axis
            if n:
                by = border.reshape(n, *(1,) * (y.ndim - axis - 1))
                y[(*rows, slice(0, n))] /= by
                y[(*rows, slice(-n, None))] /= by[::-1]

    def cost(self, batch: int) -> Cost:
        """A depthwise convolution forward, one backward, and a copy of dy for its borders."""
        flops, (inputs, outputs) = self.geometry.flops(batch), self.elements(batch)
        itemsize, copied = self.dtype.itemsize, 2 * outputs * any(map(len, self.borders))
        moved = inputs + outputs
        return Cost(flops, flops, moved * itemsize, (moved + copied) * itemsize)


def _taps(factor: int, mode: str) -> np.ndarray:
    """Weights along an axis of an input pixel in the outputs around it.

    >>> _taps(2, "bilinear")
    array([0.25, 0.75, 0.75, 0.25])
    """
    if mode == "nearest":
        return np.ones(factor)
    tap = np.arange(2 * factor - factor % 2)
    return 1 - np.abs((tap - factor // 2 + 0.5) / factor - 0.5)


def _border(factor: int, mode: str) -> np.ndarray:
    """Sums of the weights of the outputs before the centre of the first pixel, from the outside."""
    if mode == "nearest":
        return np.ones(0)
    return 0.5 + (np.arange(factor // 2) + 0.5) / factor

"""Pooling over windows, bins and whole maps: the base classes, and the layers of images."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import numpy as np

from pydtnn.kernels import PoolGeometry
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext, as_tuple
from pydtnn.layers.cost import Cost
from pydtnn.layers.window import Padding, resolve_padding, split_shape


class _Pool(Layer):
    """Base class of pooling over sliding windows of each channel.

    Parameters
    ----------
    kernel_size : int or one per axis
    stride : int or one per axis, optional
        By default the kernel's size: windows that do not overlap.
    padding : int, one or (before, after) per axis, "same" or "valid"
    """

    axes: ClassVar[int]
    saves: tuple[str, ...] = ()
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] | None = None,
        *,
        padding: Padding = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.kernel = as_tuple(kernel_size, self.axes, who, "kernel_size")
        self.stride = self.kernel if stride is None else as_tuple(stride, self.axes, who, "stride")
        self.padding = padding

    def build(self, *shapes: Shape) -> Shape:
        """Compute the geometry."""
        size, channels = split_shape(self, shapes, self.axes)
        ones = (1,) * self.axes
        padding = resolve_padding(
            self.padding, size, self.kernel, self.stride, ones, type(self).__name__
        )
        self.geometry = PoolGeometry(size, self.kernel, self.stride, padding, channels)
        return (*self.geometry.output, channels)


class _MaxPool(_Pool):
    """Base class of maxima of windows."""

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the maxima and the index of the maximum in each window."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        index = self.backend.empty(y.shape, self._index_dtype())
        self.backend.pool.max_forward(x, self.geometry, out=y, index=index)
        return y, index

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Add each gradient at the position of the maximum."""
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.pool.max_backward(dy, saved, self.geometry, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """A comparison for each tap of a window but one; an addition for each window."""
        inputs, outputs = self.elements(batch)
        moved = (inputs + outputs) * self.dtype.itemsize + outputs * self._index_dtype().itemsize
        return Cost(outputs * (prod(self.kernel) - 1), outputs, moved, moved)

    def _index_dtype(self) -> np.dtype:
        return np.dtype("uint8" if prod(self.kernel) <= 256 else "int32")


class MaxPool2d(_MaxPool):
    """Maximum of each window without padding; the first of equal values gets the gradient.

    Parameters
    ----------
    kernel_size : int or pair
    stride : int or pair, optional
        By default the kernel's size: windows that do not overlap.
    padding : int, pair, pair of (before, after), "same" or "valid"

    Notes
    -----
    Input ``(N, H, W, C)``, output ``(N, OH, OW, C)``.
    """

    axes = 2
    supports = ("16 bits", "replay")


class _AvgPool(_Pool):
    """Base class of means of windows.

    Parameters
    ----------
    kernel_size, stride, padding
        As in `_Pool`.
    count_padding : bool
        Whether the zeros of the padding count in the mean.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] | None = None,
        *,
        padding: Padding = 0,
        count_padding: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(kernel_size, stride=stride, padding=padding, name=name)
        self.count_padding = count_padding

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the means."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        self.backend.pool.average_forward(x, self.geometry, out=y, count_padding=self.count_padding)
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Distribute each gradient equally within its window."""
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.pool.average_backward(
            dy, self.geometry, out=dx, count_padding=self.count_padding
        )
        return dx

    def cost(self, batch: int) -> Cost:
        """An addition for each tap of a window, and a product for each window."""
        inputs, outputs = self.elements(batch)
        flops, moved = outputs * (prod(self.kernel) + 1), (inputs + outputs) * self.dtype.itemsize
        return Cost(flops - outputs, flops, moved, moved)


class AvgPool2d(_AvgPool):
    """Mean of each window; by default padding is counted as zeros.

    Parameters
    ----------
    kernel_size, stride, padding
        As in `MaxPool2d`.
    count_padding : bool
        Whether the zeros of the padding count in the mean.
    """

    axes = 2
    supports = ("16 bits", "replay")


class _AdaptiveAvgPool(Layer):
    """Base class of means of bins."""

    axes: ClassVar[int]
    saves: tuple[str, ...] = ()
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)
    share = 1.0  # of the map, if it is a stripe: the means of stripes are added

    def __init__(self, output_size: int | tuple[int, ...], *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.output = as_tuple(output_size, self.axes, type(self).__name__, "output_size")

    def build(self, *shapes: Shape) -> Shape:
        """Check that no bin is empty."""
        size, channels = split_shape(self, shapes, self.axes)
        if any(o > n for o, n in zip(self.output, size, strict=True)):
            raise self.fail(f"output_size must be at most the input {size}, got {self.output}")
        return (*self.output, channels)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Compute the means."""
        (x,) = xs
        y = self.empty(len(x), (*self.output, x.shape[-1]))
        self.backend.pool.adaptive_forward(x, out=y)
        if self.share != 1:
            y *= self.share
        return y.reshape(len(x), *self.output_shape), None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Distribute each gradient equally within its bin."""
        dx = self.empty(len(dy), self.input_shapes[0])
        dy = dy.reshape(len(dy), *self.output, dx.shape[-1])
        if self.share != 1:
            dy = dy * dy.dtype.type(self.share)
        self.backend.pool.adaptive_backward(dy, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """An addition for each element of a bin, and a product for each bin.

        The means of a stripe are scaled in a sweep of their own.
        """
        *size, channels = self.input_shapes[0]
        taps = prod(
            sum(-(-(i + 1) * n // o) - i * n // o for i in range(o))
            for n, o in zip(size, self.output, strict=True)
        )
        inputs, outputs = self.elements(batch)
        scaled = outputs * (self.share != 1)
        added, moved = batch * channels * taps, inputs + outputs + 2 * scaled
        moved *= self.dtype.itemsize
        return Cost(added + scaled, added + outputs + scaled, moved, moved)


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Mean of bins that cut each image into `output_size` parts.

    Output ``i`` of an axis of size ``H`` covers ``floor(i H / OH) .. ceil((i + 1) H / OH)``.

    Parameters
    ----------
    output_size : int or pair

    Notes
    -----
    Input ``(N, H, W, C)``, output ``(N, OH, OW, C)``.
    """

    axes = 2
    supports = ("16 bits", "replay")


class _GlobalAvgPool(_AdaptiveAvgPool):
    """Base class of means of whole maps."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(1, name=name)

    def build(self, *shapes: Shape) -> Shape:
        """Drop the spatial axes."""
        return super().build(*shapes)[-1:]


class GlobalAvgPool2d(_GlobalAvgPool, AdaptiveAvgPool2d):
    """Mean of each channel over the whole image: input ``(N, H, W, C)``, output ``(N, C)``."""

"""Convolutions of volumes whose channels have filters of their own, by depthwise kernels of images.

The output is a sum over the taps along the depth, each of which is a depthwise convolution of
planes: there is one product per element read, so that wider sums, as those of `Volumes`, gain
nothing, and kernels of groups are several times slower. Some planes at a time, whose sum stays in
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.cpu.planes import ImageKernels, at_once, planes_of
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array


class DepthwiseWork(NamedTuple):
    """Arrays of a call; None if its kernel does not use them.

    Attributes
    ----------
    terms : Array, shape (planes, OH, OW, O)
        What one tap adds to planes of the output.
    planes, dplanes : Array, shape (planes, H, W, C)
        Planes of the input that are not side by side, and their gradient.
    w, dw : Array, shape (kd, O, kh, kw, 1)
        Filters by taps along the depth, and their gradient.
    """

    terms: Array
    planes: Array
    dplanes: Array
    w: Array
    dw: Array


def work_of(kernel: str, geometry: ConvGeometry, dtype: Any) -> DepthwiseWork:
    """Allocate the arrays that a kernel uses besides its operands, see `Volumes`."""
    images, gradients = planes_of(geometry), kernel in ("backward", "backward_data")
    most, apart = _planes(geometry, dtype), geometry.stride[0] > 1
    plane = (most, *images.size, images.channels)
    filters = (geometry.kernel[0], *images.weight_shape)
    return DepthwiseWork(
        np.empty((most, *images.output, images.filters), dtype) if kernel == "forward" else None,
        np.empty(plane, dtype) if apart and kernel != "backward_data" else None,
        np.empty(plane, dtype) if apart and gradients else None,
        None if kernel == "backward_filter" else np.empty(filters, dtype),
        None if kernel in ("forward", "backward_data") else np.empty(filters, dtype),
    )


class DepthwiseVolumes:
    """Convolutions of volumes with as many groups as channels; arrays are contiguous.

    Parameters
    ----------
    images : ImageKernels
        Convolutions of images.
    """

    def __init__(self, images: ImageKernels) -> None:
        self.images = images

    def forward(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        geometry: ConvGeometry,
        *,
        out: Array,
        relu: bool,
        algorithm: str | None,
    ) -> None:
        """Compute the output, see `Volumes`."""
        work, images = work_of("forward", geometry, out.dtype), planes_of(geometry)
        _by_tap(work.w)[...] = w
        out[...] = 0 if b is None else b
        for n, tap, outputs, inputs in _steps(geometry, len(x), out.dtype):
            planes, y = _read(x[n, inputs], work.planes), out[n, outputs]
            term = work.terms[: len(y)]
            self.images.forward(planes, work.w[tap], None, images, out=term, algorithm=algorithm)
            np.add(y, term, out=y)
        if relu:
            np.maximum(out, 0, out=out)

    def backward_data(
        self, dy: Array, w: Array, geometry: ConvGeometry, *, out: Array, algorithm: str | None
    ) -> None:
        """Compute the gradient of the input into `out`."""
        work, images = work_of("backward_data", geometry, out.dtype), planes_of(geometry)
        _by_tap(work.w)[...] = w
        out[...] = 0
        for n, tap, outputs, inputs in _steps(geometry, len(out), out.dtype):
            dx = _read(out[n, inputs], work.dplanes)
            self.images.backward_data(
                dy[n, outputs], work.w[tap], images, out=dx, add=dx, algorithm=algorithm
            )
            _write(dx, out[n, inputs])

    def backward_filter(
        self, x: Array, dy: Array, geometry: ConvGeometry, *, algorithm: str | None
    ) -> Array:
        """Return the gradient of the filters, (O, kd, kh, kw, 1)."""
        work, images = work_of("backward_filter", geometry, x.dtype), planes_of(geometry)
        work.dw[...] = 0
        for n, tap, outputs, inputs in _steps(geometry, len(x), x.dtype):
            planes, options = _read(x[n, inputs], work.planes), {"algorithm": algorithm}
            self.images.backward_filter(
                planes, dy[n, outputs], images, out=work.dw[tap], accumulate=True, **options
            )
        return _by_tap(work.dw)

    def backward(
        self,
        x: Array,
        dy: Array,
        w: Array,
        geometry: ConvGeometry,
        *,
        dx: Array,
        algorithm: str | None,
    ) -> Array:
        """Compute the gradient of the input into `dx`; return that of the filters."""
        work, images = work_of("backward", geometry, x.dtype), planes_of(geometry)
        _by_tap(work.w)[...] = w
        dx[...], work.dw[...] = 0, 0
        for n, tap, outputs, inputs in _steps(geometry, len(x), x.dtype):
            gradient = _read(dx[n, inputs], work.dplanes)
            self.images.backward(
                _read(x[n, inputs], work.planes),
                dy[n, outputs],
                work.w[tap],
                images,
                dx=gradient,
                dw=work.dw[tap],
                accumulate=True,
                add=gradient,
                algorithm=algorithm,
            )
            _write(gradient, dx[n, inputs])
        return _by_tap(work.dw)


def _planes(geometry: ConvGeometry, dtype: Any) -> int:
    """Number of planes at a time: those of a tap's operands, and their sums."""
    images = planes_of(geometry)
    widest = max(images.channels, images.filters)
    return min(at_once((4, *images.size, widest), dtype), geometry.output[0])


def _steps(
    geometry: ConvGeometry, batch: int, dtype: Any
) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield samples and taps along the depth, with planes of the output and what they read."""
    most, depth, outputs = _planes(geometry, dtype), geometry.size[0], geometry.output[0]
    stride, (before, _), dilation = (
        geometry.stride[0],
        geometry.padding[0],
        geometry.dilation[0],
    )
    for n in range(batch):
        for start in range(0, outputs, max(most, 1)):
            for tap in range(geometry.kernel[0]):
                offset = tap * dilation - before  # output o reads plane o stride + offset
                first = max(start, -(offset // stride))
                last = min(start + most, outputs, (depth - 1 - offset) // stride + 1)
                if first < last:
                    read = slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)
                    yield n, tap, slice(first, last), read


def _read(planes: Array, work: Array | None) -> Array:
    """Return planes that are side by side, or a copy of others in `work`."""
    if work is None:
        return planes
    copy = work[: len(planes)]
    copy[...] = planes
    return copy


def _write(copy: Array, planes: Array) -> None:
    """Copy planes back, unless they were not copied."""
    if not np.may_share_memory(copy, planes):
        planes[...] = copy


def _by_tap(w: Array) -> Array:
    """View filters by taps, (kd, O, kh, kw, 1), as those of volumes, (O, kd, kh, kw, 1)."""
    return w.swapaxes(0, 1)

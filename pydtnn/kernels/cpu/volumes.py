"""Convolutions of three axes by the kernels of two.

A plane of the output is a sum over the taps along the depth, each of which reads a plane of the
input. Side by side, these planes are one image with the channels of all of them (`unfold`), so that
the sum over taps and channels is the sum over the channels of a convolution of images::

    x (N, D, H, W, C) -> planes (N OD, H, W, kd C);   w (O, kd, kh, kw, C) -> (O, kh, kw, kd C)

The output is written once, with bias and ReLU, by whichever algorithm of images is fastest,
Winograd's among them, and the longer sums suit the products of layers with few channels. A sum of
kd accumulating convolutions needs no copy of the input, but it transforms each filter and packs
outputs kd times, and reads and writes them kd times; a matrix product of all taps (im2col) copies
kh kw times as much. Backward of data writes gradients of planes, which `fold` adds up. Some planes
at a time, so that they stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from pydtnn.kernels.cpu._conv import ConvKernels, Depth
from pydtnn.kernels.cpu.compiled import contiguous, native
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

PLANES_BYTES = 4 << 20
"""Bytes of the planes that are convolved at a time, unless one plane is larger."""


class ImageKernels(Protocol):
    """The convolutions of images that are used here; `pydtnn.kernels.cpu.conv.CpuConv`."""

    xp: Any
    kernels: ConvKernels

    @property
    def threads(self) -> int:
        """Number of threads for a kernel call."""

    def forward(self, *arguments: Any, **options: Any) -> None:
        """Compute the output."""

    def backward_data(self, *arguments: Any, **options: Any) -> None:
        """Compute the gradient of the input."""

    def backward_filter(self, *arguments: Any, **options: Any) -> None:
        """Compute the gradient of the filters."""

    def backward(self, *arguments: Any, **options: Any) -> None:
        """Compute both."""


def is_depthwise(geometry: ConvGeometry) -> bool:
    """Return whether each channel of a volume has filters of its own."""
    return geometry.groups == geometry.channels > 1


@lru_cache(maxsize=1024)
def planes_of(geometry: ConvGeometry) -> ConvGeometry:
    """Return the convolution of images that computes a plane of the output, or its part by one tap.

    >>> str(planes_of(ConvGeometry((8, 9, 9), (2, 3, 3), (1,) * 3, ((0, 0),) * 3, (1,) * 3, 4, 5)))
    '3x3 8->5 on 9x9'
    """
    return ConvGeometry.shared(
        geometry.size[1:],
        geometry.kernel[1:],
        geometry.stride[1:],
        geometry.padding[1:],
        geometry.dilation[1:],
        (1 if is_depthwise(geometry) else geometry.kernel[0]) * geometry.channels,
        geometry.filters,
        geometry.groups,
    )


def at_once(plane: tuple[int, ...], dtype: Any) -> int:
    """Return how many planes are convolved at a time.

    It is a power of two: depths usually are, so that all calls have the same number of planes.
    """
    fitting = max(PLANES_BYTES // (prod(plane) * np.dtype(dtype).itemsize), 1)
    return 1 << (fitting.bit_length() - 1)


@lru_cache(maxsize=1024)
def depth_of(geometry: ConvGeometry) -> Depth:
    """Return the depth of a geometry for the compiled kernels."""
    return Depth(geometry)


class Work(NamedTuple):
    """Arrays of a call; None if its kernel does not use them.

    Attributes
    ----------
    planes, dplanes : Array, shape (planes, H, W, kd C)
        What planes of the output read, and its gradient.
    w, dw : Array, shape (O, kh, kw, kd C)
        Filters of planes, and their gradient.
    """

    planes: Array
    dplanes: Array
    w: Array
    dw: Array


def work_of(kernel: str, geometry: ConvGeometry, batch: int, dtype: Any) -> Work | DepthwiseWork:
    """Allocate the arrays that a kernel uses besides its operands.

    Parameters
    ----------
    kernel : str
        "forward", "backward_data", "backward_filter" or "backward".
    geometry : ConvGeometry
        Of three axes.
    batch : int
    dtype : numpy.dtype
    """
    if is_depthwise(geometry):
        return depthwise_work_of(kernel, geometry, dtype)
    return _work_of(kernel, geometry, batch, dtype)


def _work_of(kernel: str, geometry: ConvGeometry, batch: int, dtype: Any) -> Work:
    images = planes_of(geometry)
    plane = (*images.size, images.channels)
    shape = (min(at_once(plane, dtype), batch * geometry.output[0]), *plane)
    return Work(
        np.empty(shape, dtype),
        np.empty(shape, dtype) if kernel == "backward" else None,
        None if kernel == "backward_filter" else np.empty(images.weight_shape, dtype),
        None if kernel in ("forward", "backward_data") else np.empty(images.weight_shape, dtype),
    )


class Volumes(reference.ConvKernels):
    """Convolutions of volumes; shapes as in the reference.

    Deferred arrays, sums, additions to the gradient, outputs that are not contiguous and types
    other than float32 and float64 run on the reference. `algorithm` is that of the planes.

    Parameters
    ----------
    images : ImageKernels
        Convolutions of images.
    """

    def __init__(self, images: ImageKernels) -> None:
        super().__init__(images.xp)
        self.images = images
        self.depthwise = DepthwiseVolumes(images)

    def forward(
        self,
        x: Array | Deferred,
        w: Array,
        b: Array | None,
        geometry: ConvGeometry,
        *,
        out: Array,
        relu: bool = False,
        store: Array | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute ``out[n, p, o] = b[o] + sum over t and c of x[n, p s + t d, c] w[o, t, c]``."""
        if isinstance(x, Deferred) or sums is not None or not native(out, x, w, b):
            return super().forward(x, w, b, geometry, out=out, relu=relu, store=store, sums=sums)
        _refuse_overlap("forward: out and x", out, x)
        if is_depthwise(geometry):
            options: dict[str, Any] = {"relu": relu, "algorithm": algorithm}
            return self.depthwise.forward(contiguous(x), w, b, geometry, out=out, **options)
        x, images = contiguous(x), planes_of(geometry)
        work = _work_of("forward", geometry, len(x), out.dtype)
        self._pack(w, geometry, work)
        y = _flat(out)
        for own, planes in self._unfolded(x, geometry, work.planes):
            self.images.forward(
                planes, work.w, b, images, out=y[own], relu=relu, algorithm=algorithm
            )

    def backward_data(
        self,
        dy: Array | Deferred,
        w: Array,
        geometry: ConvGeometry,
        *,
        out: Array,
        add: Array | None = None,
        gate: Deferred | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute the gradient of the input into `out`."""
        plain = add is None and gate is None and not isinstance(dy, Deferred)
        if not plain or not native(out, dy, w):
            return super().backward_data(dy, w, geometry, out=out, add=add, gate=gate, sums=sums)
        _refuse_overlap("backward_data: out and dy", out, dy)
        if is_depthwise(geometry):
            return self.depthwise.backward_data(
                contiguous(dy), w, geometry, out=out, algorithm=algorithm
            )
        work = _work_of("backward_data", geometry, len(out), out.dtype)
        self._pack(w, geometry, work)
        flat = _flat(contiguous(dy))
        out[...] = 0
        for own in _parts(len(flat), len(work.planes)):
            planes = work.planes[: own.stop - own.start]
            self.images.backward_data(
                flat[own], work.w, planes_of(geometry), out=planes, algorithm=algorithm
            )
            self._fold(planes, geometry, own, out)

    def backward_filter(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        geometry: ConvGeometry,
        *,
        out: Array,
        accumulate: bool = False,
        algorithm: str | None = None,
    ) -> None:
        """Compute the gradient of the filters into `out`."""
        deferred = isinstance(x, Deferred) or isinstance(dy, Deferred)
        if deferred or not native(out, x, dy):
            return super().backward_filter(x, dy, geometry, out=out, accumulate=accumulate)
        if is_depthwise(geometry):
            dw = self.depthwise.backward_filter(
                contiguous(x), contiguous(dy), geometry, algorithm=algorithm
            )
            return self.store(dw, out, accumulate)
        work = _work_of("backward_filter", geometry, len(x), out.dtype)
        flat = _flat(contiguous(dy))
        work.dw[...] = 0
        for own, planes in self._unfolded(contiguous(x), geometry, work.planes):
            self.images.backward_filter(
                planes,
                flat[own],
                planes_of(geometry),
                out=work.dw,
                accumulate=True,
                algorithm=algorithm,
            )
        self._unpack(geometry, work, out, accumulate)

    def backward(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        w: Array,
        geometry: ConvGeometry,
        *,
        dx: Array,
        dw: Array,
        accumulate: bool = False,
        add: Array | None = None,
        gate: Deferred | None = None,
        sums: Array | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Compute both gradients; the planes are read once. `dx` may overlap `x`, but not `dy`."""
        deferred = isinstance(x, Deferred) or isinstance(dy, Deferred)
        plain = not deferred and add is None and gate is None and native(dx, x, dy, w)
        if not plain or not native(dw, dx) or np.may_share_memory(dx, x):
            self.backward_filter(
                x, dy, geometry, out=dw, accumulate=accumulate, algorithm=algorithm
            )
            return self.backward_data(
                dy, w, geometry, out=dx, add=add, gate=gate, sums=sums, algorithm=algorithm
            )
        _refuse_overlap("backward: dx and dy", dx, dy)
        if is_depthwise(geometry):
            gradient = self.depthwise.backward(
                contiguous(x), contiguous(dy), w, geometry, dx=dx, algorithm=algorithm
            )
            return self.store(gradient, dw, accumulate)
        work = _work_of("backward", geometry, len(x), dx.dtype)
        self._pack(w, geometry, work)
        flat = _flat(contiguous(dy))
        dx[...], work.dw[...] = 0, 0
        for own, planes in self._unfolded(contiguous(x), geometry, work.planes):
            gradients = work.dplanes[: len(planes)]
            self.images.backward(
                planes,
                flat[own],
                work.w,
                planes_of(geometry),
                dx=gradients,
                dw=work.dw,
                accumulate=True,
                algorithm=algorithm,
            )
            self._fold(gradients, geometry, own, dx)
        self._unpack(geometry, work, dw, accumulate)

    # -- planes --------------------------------------------------------------------------------

    def _unfolded(
        self, x: Array, geometry: ConvGeometry, planes: Array
    ) -> Iterator[tuple[slice, Array]]:
        """Yield ranges of planes, counted over all volumes, with what they read of `x`."""
        for own in _parts(len(x) * geometry.output[0], len(planes)):
            part = planes[: own.stop - own.start]
            self.images.kernels.unfold(x, depth_of(geometry), own.start, part, self.images.threads)
            yield own, part

    def _fold(self, planes: Array, geometry: ConvGeometry, own: slice, out: Array) -> None:
        self.images.kernels.fold(planes, depth_of(geometry), own.start, out, self.images.threads)

    @staticmethod
    def _pack(w: Array, geometry: ConvGeometry, work: Work) -> None:
        """Reorder the filters (O, kd, kh, kw, C) to (O, kh, kw, kd, C)."""
        _by_depth(work.w, geometry)[...] = w

    def _unpack(self, geometry: ConvGeometry, work: Work, out: Array, accumulate: bool) -> None:
        self.store(_by_depth(work.dw, geometry), out, accumulate)


def _by_depth(w: Array, geometry: ConvGeometry) -> Array:
    """View filters of planes, (O, kh, kw, kd C), as those of volumes, (O, kd, kh, kw, C)."""
    split = (len(w), *geometry.kernel[1:], geometry.kernel[0], -1)
    return w.reshape(split).transpose(0, 3, 1, 2, 4)


def _flat(y: Array) -> Array:
    """View (N, OD, OH, OW, O) as planes, (N OD, OH, OW, O)."""
    return y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])


def _parts(planes: int, most: int) -> Iterator[slice]:
    """Cut all planes into parts of at most `most`."""
    for start in range(0, planes, max(most, 1)):
        yield slice(start, min(start + most, planes))


def _refuse_overlap(who: str, out: Array, read: Array) -> None:
    """Raise ValueError if an output overlaps an input, which is still read after writes."""
    if np.may_share_memory(out, read):
        raise ValueError(f"conv.{who} overlap in memory; give the output an array of its own.")


# Convolutions of volumes whose channels have filters of their own, by depthwise kernels of images.
#
# The output is a sum over the taps along the depth, each of which is a depthwise convolution of
# planes: there is one product per element read, so that wider sums, as those of `Volumes`, gain
# nothing, and kernels of groups are several times slower. Some planes at a time, whose sum stays in
# cache.


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


def depthwise_work_of(kernel: str, geometry: ConvGeometry, dtype: Any) -> DepthwiseWork:
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
        work, images = depthwise_work_of("forward", geometry, out.dtype), planes_of(geometry)
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
        work, images = depthwise_work_of("backward_data", geometry, out.dtype), planes_of(geometry)
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
        work, images = depthwise_work_of("backward_filter", geometry, x.dtype), planes_of(geometry)
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
        work, images = depthwise_work_of("backward", geometry, x.dtype), planes_of(geometry)
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

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

If each channel has filters of its own, the output is a sum over the taps along the depth, each of
which is a depthwise convolution of planes: there is one product per element read, so that wider
sums gain nothing, and kernels of groups are several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.cpu._conv import Depth
from pydtnn.kernels.cpu.compiled import contiguous, native
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

PLANES_BYTES = 4 << 20
"""Bytes of the planes that are convolved at a time, unless one plane is larger."""


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
    planes, dplanes : Array, shape (planes, H, W, kd C) or (planes, H, W, C)
        What planes of the output read, if it is not side by side in the input, and its gradient.
    w, dw : Array, shape (O, kh, kw, kd C) or (kd, O, kh, kw, 1)
        Filters of planes, or those of each tap along the depth, and their gradient.
    terms : Array, shape (planes, OH, OW, O)
        What one tap adds to planes of the output.
    """

    planes: Array
    dplanes: Array
    w: Array
    dw: Array
    terms: Array


def work_of(kernel: str, geometry: ConvGeometry, batch: int, dtype: Any) -> Work:
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
    images, taps, forward = planes_of(geometry), is_depthwise(geometry), kernel == "forward"
    most, apart = _most(geometry, batch, dtype), not taps or geometry.stride[0] > 1
    planes = most, *images.size, images.channels
    filters = (*([geometry.kernel[0]] if taps else []), *images.weight_shape)
    terms = most, *images.output, images.filters
    needed = (
        (planes, apart and kernel != "backward_data"),
        (planes, apart and kernel in ("backward_data", "backward")),
        (filters, kernel != "backward_filter"),
        (filters, kernel in ("backward_filter", "backward")),
        (terms, taps and forward),
    )
    return Work(*(np.empty(shape, dtype) if needs else None for shape, needs in needed))


@lru_cache(maxsize=1024)
def _most(geometry: ConvGeometry, batch: int, dtype: Any) -> int:
    """Return how many planes of a batch are convolved at a time."""
    images = planes_of(geometry)
    if is_depthwise(geometry):  # those of a tap's operands, and their sums
        widest = max(images.channels, images.filters)
        return min(at_once((4, *images.size, widest), dtype), geometry.output[0])
    return min(at_once((*images.size, images.channels), dtype), batch * geometry.output[0])


PlanesStep = tuple[slice, Array, Array, Array, Array, Array]
"""Planes that are convolved at a time: where they are among those of all outputs; what they read,
and its gradient; what is added to that; filters, and their gradient. None: not needed."""


class Volumes(reference.ConvKernels):
    """Convolutions of volumes; shapes as in the reference.

    Deferred arrays, sums, additions to the gradient, outputs that are not contiguous and types
    other than float32 and float64 run on the reference. `algorithm` is that of the planes.

    Parameters
    ----------
    images : CpuConv
        Convolutions of images.
    """

    def __init__(self, images: Any) -> None:
        super().__init__(images.xp)
        self.images = images

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
        work = work_of("forward", geometry, len(x), out.dtype)
        _of_volumes(work.w, geometry)[...] = w
        whole, images, options = _flat(out), planes_of(geometry), {"algorithm": algorithm}
        if work.terms is not None:
            out[...] = 0 if b is None else b
        for own, planes, _, _, filters, _ in self._steps(contiguous(x), None, geometry, work):
            y = whole[own]
            if work.terms is None:
                self.images.forward(planes, filters, b, images, out=y, relu=relu, **options)
            else:
                term = work.terms[: len(y)]
                self.images.forward(planes, filters, None, images, out=term, **options)
                np.add(y, term, out=y)
        if relu and work.terms is not None:
            np.maximum(out, 0, out=out)

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
        self._backward(None, dy, w, geometry, out, None, algorithm=algorithm)

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
        self._backward(x, dy, None, geometry, None, out, accumulate, algorithm)

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
        self._backward(x, dy, w, geometry, dx, dw, accumulate, algorithm)

    def _backward(
        self,
        x: Array | None,
        dy: Array,
        w: Array | None,
        geometry: ConvGeometry,
        dx: Array | None,
        dw: Array | None,
        accumulate: bool = False,
        algorithm: str | None = None,
    ) -> None:
        """Compute the gradient of the input from the filters, that of the filters, or both."""
        kernel = "backward_data" if dw is None else "backward_filter" if dx is None else "backward"
        work = work_of(kernel, geometry, len(dy), dy.dtype)
        flat, images = _flat(contiguous(dy)), planes_of(geometry)
        if dx is not None:
            _of_volumes(work.w, geometry)[...] = w
            dx[...] = 0
        if dw is not None:
            work.dw[...] = 0
        read = None if x is None else contiguous(x)
        for own, planes, gradient, so_far, own_w, own_dw in self._steps(read, dx, geometry, work):
            part, into = flat[own], {"algorithm": algorithm, "add": so_far}
            if dw is None:
                self.images.backward_data(part, own_w, images, out=gradient, **into)
            elif dx is None:
                self.images.backward_filter(
                    planes, part, images, out=own_dw, accumulate=True, algorithm=algorithm
                )
            else:
                self.images.backward(
                    planes, part, own_w, images, dx=gradient, dw=own_dw, accumulate=True, **into
                )
        if dw is not None:
            self.store(_of_volumes(work.dw, geometry), dw, accumulate)

    # -- planes --------------------------------------------------------------------------------

    def _steps(
        self, x: Array | None, dx: Array | None, geometry: ConvGeometry, work: Work
    ) -> Iterator[PlanesStep]:
        """Yield planes that are convolved at a time, then put the gradient of each into `dx`."""
        if is_depthwise(geometry):
            yield from _taps(x, dx, geometry, work)
            return
        images, depth = self.images, depth_of(geometry)
        given: Any = dx if x is None else x
        outputs, most = len(given) * geometry.output[0], _most(geometry, len(given), given.dtype)
        for start in range(0, outputs, max(most, 1)):
            own = slice(start, min(start + most, outputs))
            planes, gradient = (
                None if array is None else array[: own.stop - start]
                for array in (work.planes, work.dplanes)
            )
            if x is not None:
                images.kernels.unfold(x, depth, start, planes, images.threads)
            yield own, planes, gradient, None, work.w, work.dw
            if dx is not None:
                images.kernels.fold(gradient, depth, start, dx, images.threads)


def _taps(
    x: Array | None, dx: Array | None, geometry: ConvGeometry, work: Work
) -> Iterator[PlanesStep]:
    """Yield planes with each tap along the depth, if channels have filters of their own."""
    given: Any = dx if x is None else x
    depth, outputs, stride = geometry.size[0], geometry.output[0], geometry.stride[0]
    most = _most(geometry, len(given), given.dtype)
    for n, start, tap in product(
        range(len(given)), range(0, outputs, max(most, 1)), range(geometry.kernel[0])
    ):
        # output o reads plane o stride + offset
        offset = tap * geometry.dilation[0] - geometry.padding[0][0]
        first = max(start, -(offset // stride))
        last = min(start + most, outputs, (depth - 1 - offset) // stride + 1)
        if first >= last:
            continue
        place = n, slice(first * stride + offset, (last - 1) * stride + offset + 1, stride)
        planes = None if x is None else _side_by_side(x[place], work.planes)
        gradient = None if dx is None else _side_by_side(dx[place], work.dplanes)
        w = None if work.w is None else work.w[tap]
        dw = None if work.dw is None else work.dw[tap]
        own = slice(n * outputs + first, n * outputs + last)
        yield own, planes, gradient, gradient, w, dw
        if dx is not None and work.dplanes is not None:
            dx[place] = gradient


def _side_by_side(planes: Array, work: Array | None) -> Array:
    """Return planes, or a copy of those that are not side by side in `work`."""
    if work is None:
        return planes
    copy = work[: len(planes)]
    copy[...] = planes
    return copy


def _of_volumes(w: Array, geometry: ConvGeometry) -> Array:
    """View filters of planes, or of taps, as those of volumes, (O, kd, kh, kw, C)."""
    if is_depthwise(geometry):
        return w.swapaxes(0, 1)
    split = (len(w), *geometry.kernel[1:], geometry.kernel[0], -1)
    return w.reshape(split).transpose(0, 3, 1, 2, 4)


def _flat(y: Array) -> Array:
    """View (N, OD, OH, OW, O) as planes, (N OD, OH, OW, O)."""
    return y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])


def _refuse_overlap(who: str, out: Array, read: Array) -> None:
    """Raise ValueError if an output overlaps an input, which is still read after writes."""
    if np.may_share_memory(out, read):
        raise ValueError(f"conv.{who} overlap in memory; give the output an array of its own.")

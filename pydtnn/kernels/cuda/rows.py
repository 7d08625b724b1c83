"""Convolutions as products of matrices: for what cuDNN lacks, and to measure it against.

The inputs that an output position meets are copied into a row (im2row); a row times the filters is
the output there. Each group of channels is a matrix of its own. A pointwise convolution copies
nothing. Images are worked on in portions, so that the rows fit into a buffer.

Everything here is array operations of `xp` besides the products: the tests run it on NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array

BUFFER_BYTES = 256 << 20
"""Bytes of rows at a time, about."""

NAME = "rows"

Slices = tuple[slice, ...]


def taps(geometry: ConvGeometry) -> Iterator[tuple[int, Slices, Slices]]:
    """Yield each tap's number with the outputs that meet an input there, and those inputs."""
    for tap, offset in enumerate(product(*map(range, geometry.kernel))):
        outputs, inputs = [], []
        for o, n, s, (before, _), d, count in zip(
            offset,
            geometry.size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.output,
            strict=True,
        ):
            shift = o * d - before  # output p meets input p s + shift
            first = max(0, -(shift // s))
            last = min(count, (n - 1 - shift) // s + 1)
            outputs.append(slice(first, last))
            inputs.append(slice(first * s + shift, (last - 1) * s + shift + 1, s))
        if all(out.start < out.stop for out in outputs):
            yield tap, tuple(outputs), tuple(inputs)


def im2row(x: Array, geometry: ConvGeometry, *, out: Array) -> None:
    """Copy what each output position meets into its row, zeros for padding.

    Parameters
    ----------
    x : Array, shape (N, *size, C)
    geometry : ConvGeometry
    out : Array, shape (G, N, *output, taps, C / G)
    """
    if any(map(any, geometry.padding)):
        out[...] = 0
    groups = by_group(x, geometry.groups)
    for tap, outputs, inputs in taps(geometry):
        out[:, :, *outputs, tap] = groups[:, :, *inputs]


def row2im(rows: Array, geometry: ConvGeometry, *, out: Array) -> None:
    """Add the rows up where `im2row` took them from: to `out` (N, *size, C)."""
    groups = by_group(out, geometry.groups)
    for tap, outputs, inputs in taps(geometry):
        groups[:, :, *inputs] += rows[:, :, *outputs, tap]


def by_group(x: Array, groups: int) -> Array:
    """View an array (..., C) as (G, ..., C / G)."""
    split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    last = split.ndim - 1
    return split.transpose(last - 1, *range(last - 1), last)


class Rows:
    """Convolutions by one matrix product for each portion of the images.

    Parameters
    ----------
    xp : module
        ``cupy``, or in tests ``numpy``.
    multiply : callable
        ``multiply(a, b, out, accumulate)`` computes ``out = a b`` of batches of matrices, see
        `pydtnn.kernels.cuda.cublas.Products`.
    """

    def __init__(self, xp: Any, multiply: Callable[[Array, Array, Array, bool], None]) -> None:
        self._xp, self._multiply = xp, multiply

    def candidates(
        self, direction: str, geometry: ConvGeometry, batch: int, dtype: Any
    ) -> tuple[str, ...]:
        """Name the only algorithm, which suits everything."""
        return (NAME,)

    def run(
        self,
        algorithm: str,
        direction: str,
        first: Array,
        second: Array,
        geometry: ConvGeometry,
        *,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute one direction. See `pydtnn.kernels.cuda.engine.ConvEngine`."""
        directions = {
            "forward": self._forward,
            "backward_data": self._backward_data,
            "backward_filter": self._backward_filter,
        }
        directions[direction](first, second, geometry, out, accumulate)

    def _forward(self, x: Array, w: Array, g: ConvGeometry, out: Array, accumulate: bool) -> None:
        filters = _filters(w, g).transpose(0, 2, 1)  # (G, K, O / G)
        for images in _portions(len(x), g, x.itemsize):
            self._multiply(self._gather(x[images], g), filters, _flat(out[images], g), accumulate)

    def _backward_data(
        self, w: Array, dy: Array, g: ConvGeometry, out: Array, accumulate: bool
    ) -> None:
        filters = _filters(w, g)
        if _is_pointwise(g):
            return self._multiply(_flat(dy, g), filters, _flat(out, g), accumulate)
        # rows of 16 bits, added up, would be rounded once per tap
        exact = "float32" if dy.itemsize == 2 else dy.dtype
        for images in _portions(len(dy), g, max(dy.itemsize, 4)):
            rows = self._rows(images, g, exact)
            self._multiply(_flat(dy[images], g), filters, _matrices(rows, g), False)
            if out.dtype == exact:
                total = out[images]
                if not accumulate:
                    total[...] = 0
                row2im(rows, g, out=total)
            else:
                total = self._xp.zeros(out[images].shape, exact)
                row2im(rows, g, out=total)
                if accumulate:
                    total += out[images]
                out[images] = total

    def _backward_filter(
        self, x: Array, dy: Array, g: ConvGeometry, out: Array, accumulate: bool
    ) -> None:
        for images in _portions(len(x), g, x.itemsize):
            turned = _flat(dy[images], g).transpose(0, 2, 1)  # (G, O / G, positions)
            self._multiply(turned, self._gather(x[images], g), _filters(out, g), accumulate)
            accumulate = True

    def _gather(self, x: Array, g: ConvGeometry) -> Array:
        """Rows of some images, (G, positions, K)."""
        if _is_pointwise(g):
            return _flat(x, g)
        rows = self._rows(slice(0, len(x)), g, x.dtype)
        im2row(x, g, out=rows)
        return _matrices(rows, g)

    def _rows(self, images: slice, g: ConvGeometry, dtype: Any) -> Array:
        shape = (images.stop - images.start, *g.output, prod(g.kernel), g.channels // g.groups)
        return self._xp.empty((g.groups, *shape), dtype)


def _is_pointwise(g: ConvGeometry) -> bool:
    """Whether the input is already the rows."""
    return {*g.kernel, *g.stride} == {1} and not any(map(any, g.padding))


def _portions(batch: int, g: ConvGeometry, itemsize: int) -> Iterator[slice]:
    image = prod(g.output) * prod(g.kernel) * g.channels * itemsize
    count = batch if _is_pointwise(g) else max(1, BUFFER_BYTES // image)
    for start in range(0, batch, count):
        yield slice(start, min(start + count, batch))


def _filters(w: Array, g: ConvGeometry) -> Array:
    return w.reshape(g.groups, g.filters // g.groups, -1)  # (G, O / G, K)


def _flat(x: Array, g: ConvGeometry) -> Array:
    return by_group(x.reshape(-1, x.shape[-1]), g.groups)  # (N, ..., C) -> (G, N * ..., C / G)


def _matrices(rows: Array, g: ConvGeometry) -> Array:
    positions = prod(rows.shape[1:-2])
    return rows.reshape(g.groups, positions, prod(rows.shape[-2:]))  # (G, N * ..., K)

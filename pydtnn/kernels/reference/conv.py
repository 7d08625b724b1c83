"""Reference convolution: one matrix product per tap of the kernel.

A convolution is a sum over the offsets of its kernel. At each offset every output position uses one
input position, so these inputs are a strided slice of the input. Padding is not multiplied: a
filter that is NaN does not make it NaN. The three directions are
the same loop with the roles of the three arrays exchanged. Any number of spatial axes. Beside
16-bit arrays, biases and gradients of filters are float32; sums are computed in float32 and rounded
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference.family import Array, KernelFamily, wide
from pydtnn.kernels.reference.fused import FusedKernels
from pydtnn.kernels.reference.norm import NormKernels

Index = tuple[int, ...]


def taps(geometry: ConvGeometry) -> Iterator[tuple[Index, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield each offset of the kernel, the outputs that use an input there, and these inputs."""
    axes = [
        [_tap(o * d - before, s, size, n) for o in range(kernel)]
        for kernel, d, s, (before, _), size, n in zip(
            *(geometry.kernel, geometry.dilation, geometry.stride, geometry.padding),
            *(geometry.size, geometry.output),
            strict=True,
        )
    ]
    for offset in product(*map(range, geometry.kernel)):
        outputs, inputs = zip(*(axis[o] for axis, o in zip(axes, offset, strict=True)), strict=True)
        yield offset, outputs, inputs


def _tap(shift: int, stride: int, size: int, outputs: int) -> tuple[slice, slice]:
    """Outputs p of an axis for which ``p stride + shift`` is one of `size` inputs, and these."""
    first = max(-(shift // stride), 0)
    stop = max(min((size - 1 - shift) // stride + 1, outputs), first)
    start = first * stride + shift
    return slice(first, stop), slice(start, start + stride * (stop - first), stride)


class ConvKernels(KernelFamily):
    """Cross-correlation of images.

    ``x (N, *size, C)``, ``w (O, *kernel, C / groups)``, ``y (N, *output, O)``.
    """

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
    ) -> None:
        """Compute ``out[n, p, o] = b[o] + sum over t, c of x[n, p s + t d, c] w[o, t, c]``.

        Parameters
        ----------
        x : Array or Deferred
            A deferred input is computed while it is read.
        w, b : Array
        geometry : ConvGeometry
        out : Array
        relu : bool
            Whether to apply a ReLU to `out`.
        store : Array, optional
            Shaped like `x`; receives the values of a deferred `x`. May be the array of a term.
        sums : Array, shape (1 + 2 O,), float64, optional
            Receives `NormKernels.statistics` of `out`.
        """
        x, w = self._values(x, store), wide(w)
        x, y = wide(x), self.xp.zeros(out.shape, arithmetic(out.dtype))
        y += 0 if b is None else b
        for offset, outputs, inputs in taps(geometry):
            for channels, filters in self._groups(geometry):
                y[:, *outputs, filters] += x[:, *inputs, channels] @ w[filters, *offset].T
        out[...] = self.xp.maximum(y, 0) if relu else y
        if sums is not None:
            NormKernels(self.xp).statistics(out, out=sums)

    def takes_sums(
        self, geometry: ConvGeometry, batch: int, dtype: Any, *, bias: bool, relu: bool
    ) -> bool:
        """Return whether `forward` computes sums; if not, `NormKernels` computes them."""
        return False

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
    ) -> None:
        """Compute the gradient of the input into `out`, the transpose of forward.

        With `add` (which may be `out`), `gate` and `sums`, apply `FusedKernels.gate` to it.
        """
        dy, w = wide(self._values(dy)), wide(w)
        dx = self.xp.zeros(out.shape, arithmetic(out.dtype))
        for offset, outputs, inputs in taps(geometry):
            for channels, filters in self._groups(geometry):
                dx[:, *inputs, channels] += dy[:, *outputs, filters] @ w[filters, *offset]
        if gate is not None:
            FusedKernels(self.xp).gate(dx, gate, out=out, sums=sums, add=add)
        else:
            out[...] = dx if add is None else dx + wide(add)

    def backward_filter(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        geometry: ConvGeometry,
        *,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute the gradient of the filters: per tap, ``dy' x`` over all images and positions."""
        x, dy = wide(self._values(x)), wide(self._values(dy))
        if not accumulate:
            out[...] = 0
        for offset, outputs, inputs in taps(geometry):
            for channels, filters in self._groups(geometry):
                left, right = dy[:, *outputs, filters], x[:, *inputs, channels]
                # `dot` and `tensordot` leave products with a matrix of one 0 out, also 0 times NaN
                out[filters, *offset] += self._rows(left).T @ self._rows(right)

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
    ) -> None:
        """Compute both gradients, as `backward_data` and `backward_filter` do, reading dy once.

        `gate` is None or `x` itself.
        """
        self.backward_filter(x, dy, geometry, out=dw, accumulate=accumulate)
        self.backward_data(dy, w, geometry, out=dx, add=add, gate=gate, sums=sums)

    def _values(self, x: Array | Deferred, store: Array | None = None) -> Array:
        if store is None or not isinstance(x, Deferred):
            return FusedKernels(self.xp).values(x)
        FusedKernels(self.xp).evaluate(x, out=store)
        return store

    @staticmethod
    def _rows(x: Array) -> Array:
        return x.reshape(-1, x.shape[-1])

    @staticmethod
    def _groups(geometry: ConvGeometry) -> Iterator[tuple[slice, slice]]:
        channels = geometry.channels // geometry.groups
        filters = geometry.filters // geometry.groups
        for g in range(geometry.groups):
            yield (
                slice(g * channels, (g + 1) * channels),
                slice(g * filters, (g + 1) * filters),
            )

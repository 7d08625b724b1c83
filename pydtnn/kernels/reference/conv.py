"""Reference convolution: one matrix product per tap of the kernel.

A convolution is a sum over the offsets of its kernel. At each offset every output position uses one
input position, so these inputs are a strided slice of the padded input. The three directions are
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
from pydtnn.kernels.reference.family import Array, Family, wide
from pydtnn.kernels.reference.fused import Fused
from pydtnn.kernels.reference.norm import Norm

Index = tuple[int, ...]


def taps(geometry: ConvGeometry) -> Iterator[tuple[Index, tuple[slice, ...]]]:
    """Yield each offset of the kernel with its slices of the padded input."""
    for offset in product(*map(range, geometry.kernel)):
        yield (
            offset,
            tuple(
                slice(o * d, o * d + s * (n - 1) + 1, s)
                for o, d, s, n in zip(
                    offset, geometry.dilation, geometry.stride, geometry.output, strict=True
                )
            ),
        )


class Conv(Family):
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
            Receives `Norm.statistics` of `out`.
        """
        x, w = self._values(x, store), wide(w)
        padded = self._pad(x, geometry)
        y = self.xp.zeros(out.shape, arithmetic(out.dtype))
        y += 0 if b is None else b
        for offset, window in taps(geometry):
            for channels, filters in self._groups(geometry):
                y[..., filters] += padded[:, *window, channels] @ w[filters, *offset].T
        out[...] = self.xp.maximum(y, 0) if relu else y
        if sums is not None:
            Norm(self.xp).statistics(out, out=sums)

    def takes_sums(
        self, geometry: ConvGeometry, batch: int, dtype: Any, *, bias: bool, relu: bool
    ) -> bool:
        """Return whether `forward` computes sums; if not, `Norm` computes them from the output."""
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

        With `add` (which may be `out`), `gate` and `sums`, apply `Fused.gate` to it.
        """
        dy, w = wide(self._values(dy)), wide(w)
        padded = self._padded_zeros(out, geometry)
        for offset, window in taps(geometry):
            for channels, filters in self._groups(geometry):
                padded[:, *window, channels] += dy[..., filters] @ w[filters, *offset]
        dx = padded[:, *self._inside(geometry)]
        if gate is not None:
            Fused(self.xp).gate(dx, gate, out=out, sums=sums, add=add)
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
        x, dy = self._values(x), wide(self._values(dy))
        padded = self._pad(x, geometry)
        if not accumulate:
            out[...] = 0
        axes = list(range(x.ndim - 1))
        for offset, window in taps(geometry):
            for channels, filters in self._groups(geometry):
                dw = self.xp.tensordot(dy[..., filters], padded[:, *window, channels], (axes, axes))
                out[filters, *offset] += dw

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
            return Fused(self.xp).values(x)
        Fused(self.xp).evaluate(x, out=store)
        return store

    @staticmethod
    def _groups(geometry: ConvGeometry) -> Iterator[tuple[slice, slice]]:
        channels = geometry.channels // geometry.groups
        filters = geometry.filters // geometry.groups
        for g in range(geometry.groups):
            yield (
                slice(g * channels, (g + 1) * channels),
                slice(g * filters, (g + 1) * filters),
            )

    @staticmethod
    def _inside(geometry: ConvGeometry) -> tuple[slice, ...]:
        return tuple(
            slice(before, before + n)
            for n, (before, _) in zip(geometry.size, geometry.padding, strict=True)
        )

    def _pad(self, x: Array, geometry: ConvGeometry) -> Array:
        return self.xp.pad(wide(x), ((0, 0), *geometry.padding, (0, 0)))

    def _padded_zeros(self, x: Array, geometry: ConvGeometry) -> Array:
        size = (n + sum(p) for n, p in zip(geometry.size, geometry.padding, strict=True))
        return self.xp.zeros((len(x), *size, geometry.channels), arithmetic(x.dtype))

"""Compiled convolutions of one and two axes."""

from __future__ import annotations

from functools import lru_cache

from pydtnn.kernels.cpu._conv import ConvKernels, Shape
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

shape_of = lru_cache(maxsize=1024)(Shape)


class Conv(Compiled, reference.Conv):
    """Convolutions on the CPU; shapes as in the reference. Three axes run on the reference."""

    table = ConvKernels

    def forward(
        self, x: Array, w: Array, b: Array | None, geometry: ConvGeometry, *, out: Array
    ) -> None:
        """Compute ``out[n, p, o] = b[o] + sum over t and c of x[n, p s + t d, c] w[o, t, c]``."""
        if not _takes(geometry, out, x, w, b):
            return super().forward(x, w, b, geometry, out=out)
        b = None if b is None else contiguous(b)
        self.kernels.forward(contiguous(x), contiguous(w), b, shape_of(geometry), out, self.threads)

    def backward_data(self, dy: Array, w: Array, geometry: ConvGeometry, *, out: Array) -> None:
        """Compute the gradient of the input into `out`."""
        if not _takes(geometry, out, dy, w):
            return super().backward_data(dy, w, geometry, out=out)
        self.kernels.backward_data(
            contiguous(dy), contiguous(w), shape_of(geometry), out, self.threads
        )

    def backward_filter(
        self, x: Array, dy: Array, geometry: ConvGeometry, *, out: Array, accumulate: bool = False
    ) -> None:
        """Compute the gradient of the filters into `out`."""
        if not _takes(geometry, out, x, dy):
            return super().backward_filter(x, dy, geometry, out=out, accumulate=accumulate)
        self.kernels.backward_filter(
            contiguous(x), contiguous(dy), shape_of(geometry), out, accumulate, self.threads
        )


def _takes(geometry: ConvGeometry, out: Array, *inputs: Array | None) -> bool:
    return len(geometry.size) <= 2 and native(out, *inputs)

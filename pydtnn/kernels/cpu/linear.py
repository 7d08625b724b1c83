"""Compiled kernels of fully connected layers."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._linear import LinearKernels
from pydtnn.kernels.cpu.compiled import (
    Compiled,
    beside,
    contiguous,
    gradient,
    require,
    supported,
)
from pydtnn.kernels.reference import linear as reference
from pydtnn.kernels.reference.family import Array


class CpuLinear(Compiled, reference.LinearKernels):
    """Fully connected layers on the CPU; shapes as in the reference."""

    table = LinearKernels

    def forward(self, x: Array, w: Array, b: Array | None, *, out: Array) -> None:
        """Compute ``out = x w' + b``."""
        if not (supported(out, x, w) and beside(out, b)):
            return super().forward(x, w, b, out=out)
        b = None if b is None else contiguous(b)
        self.kernels.forward(contiguous(x), contiguous(w), b, out, self.threads)

    def backward_data(self, dy: Array, w: Array, *, out: Array) -> None:
        """Compute ``dx = dy w`` into `out` (N, I)."""
        if not supported(out, dy, w):
            return super().backward_data(dy, w, out=out)
        self.kernels.backward_data(contiguous(dy), contiguous(w), out, self.threads)

    def backward_filter(self, x: Array, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute ``dw = dy' x`` into `out` (O, I)."""
        if not gradient(out, x, dy):
            return super().backward_filter(x, dy, out=out, accumulate=accumulate)
        self.kernels.backward_filter(contiguous(x), contiguous(dy), out, accumulate, self.threads)

    def backward_bias(self, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Sum `dy` (..., C) over all axes but the last into `out` (C,)."""
        if not gradient(out, dy):
            return super().backward_bias(dy, out=out, accumulate=accumulate)
        self.kernels.backward_bias(contiguous(dy), out, accumulate, self.threads)

    def add_rows(self, dy: Array, rows: Array, *, out: Array, accumulate: bool = False) -> None:
        """Add each row of `dy` (N, C) to the row ``rows[n]`` of `out` (K, C), in their order."""
        rows = np.require(rows, np.int64, ["C", "A"])
        require(gradient(out, dy))
        self.kernels.add_rows(contiguous(dy), rows, out, accumulate, self.threads)

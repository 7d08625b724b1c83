"""Compiled kernels of fully connected layers."""

from __future__ import annotations

from pydtnn.kernels.cpu._linear import LinearKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native
from pydtnn.kernels.reference import linear as reference
from pydtnn.kernels.reference.family import Array


class Linear(Compiled, reference.Linear):
    """Fully connected layers on the CPU; shapes as in the reference."""

    table = LinearKernels

    def backward_bias(self, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Sum `dy` (..., C) over all axes but the last into `out` (C,)."""
        if not native(out, dy):
            return super().backward_bias(dy, out=out, accumulate=accumulate)
        self.kernels.backward_bias(contiguous(dy), out, accumulate, self.threads)

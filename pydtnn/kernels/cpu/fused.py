"""Compiled kernels of deferred arrays."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cpu._conv import FusedKernels, ready
from pydtnn.kernels.cpu.compiled import Compiled, require
from pydtnn.kernels.cpu.norm import CpuNorm
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.reference import fused as reference
from pydtnn.kernels.reference.family import Array


class CpuFused(Compiled, reference.FusedKernels):
    """Deferred arrays on the CPU; those with arrays that are not contiguous run on the reference.

    So do coefficients of another type than the arrays.
    """

    table = FusedKernels

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp, isa, threads)
        self.norm = CpuNorm(xp, isa, threads)

    def values(self, x: Array | Deferred) -> Array:
        """Return `x` itself, or the values of a deferred array: the stored ones, or new ones."""
        return super().values(x)  # calls the compiled evaluate

    def evaluate(self, value: Deferred, *, out: Array) -> None:
        """Compute the values into `out`, which may be the array of a term."""
        if ready(out, value):
            self.kernels.evaluate(value, out, self.threads)
        elif out.ndim > 2 and len(out) and ready(out[0], value):  # rows of a larger array
            for sample, row in enumerate(out):
                terms = [Term(x[sample], pivot, factor) for x, pivot, factor in value.terms]
                part = value.of_terms(*terms, shift=value.shift)
                self.kernels.evaluate(part, row, self.threads)
        else:
            super().evaluate(value, out=out)

    def gate(
        self,
        dy: Array,
        value: Deferred,
        *,
        out: Array,
        sums: Array | None = None,
        add: Array | None = None,
    ) -> None:
        """Compute ``out = dy + add``, masked by the ReLU of `value`, and its sums."""
        require(ready(out, dy, value, add))
        self.kernels.gate(dy, value, out, sums, add, self.threads)

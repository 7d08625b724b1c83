"""Reference kernels of deferred arrays: batch norm, residual sums and ReLU in one pass.

Coefficients of 16-bit arrays are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.reference.family import Array, KernelFamily, wide
from pydtnn.kernels.reference.norm import NormGradient, NormKernels


class FusedKernels(KernelFamily):
    """Elementwise maps ``v = shift + sum of factor (x - pivot)``, with an optional ReLU."""

    def __init__(self, xp: Any) -> None:
        super().__init__(xp)
        self.norm = NormKernels(xp)

    def evaluate(self, value: Deferred, *, out: Array) -> None:
        """Compute the values into `out`, which may be the array of a term."""
        result = 0 if value.shift is None else value.shift
        for x, pivot, factor in value.terms:
            centred = wide(x) if pivot is None else wide(x) - pivot
            result = result + (centred if factor is None else centred * factor)
        if value.relu:
            result = self.xp.clip(result, 0, value.limit)
        out[...] = result

    def gate(
        self,
        dy: Array,
        value: Deferred,
        *,
        out: Array,
        sums: Array | None = None,
        add: Array | None = None,
    ) -> None:
        """Apply the ReLU mask of `value` to a gradient, and compute its sums over the rows.

        ``out = dy + add`` where the value is positive and below its limit, or NaN, or has no ReLU,
        otherwise 0; `out` may be `dy` or `add`. `sums` (1 + terms, C) float64 receives ``sum out``
        and, for each term, ``sum out (x - pivot)``: the sums for the backward of batch norm.
        """
        total = wide(dy) if add is None else wide(dy) + wide(add)
        if value.relu:
            v = self.values(value)
            closed = v <= 0 if value.limit == inf else (v <= 0) | (v >= value.limit)
            total = self.xp.where(closed, 0, total)
        out[...] = total
        if sums is not None:
            axes = tuple(range(out.ndim - 1))
            dz = out.astype("float64")
            sums[0] = dz.sum(axis=axes)
            for i, (x, pivot, _) in enumerate(value.terms, start=1):
                sums[i] = (dz * (x if pivot is None else x.astype("float64") - pivot)).sum(
                    axis=axes
                )

    def gate_norms(
        self,
        dy: Array,
        value: Deferred,
        norms: Sequence[NormGradient | None],
        *,
        out: Array,
        sums: Array,
    ) -> None:
        """Compute `gate` with `sums`, then `NormKernels.backward_coefficients`.

        `norms` has an entry for each term; None for one without batch norm.
        """
        self.gate(dy, value, out=out, sums=sums)
        for i, (term, norm) in enumerate(zip(value.terms, norms, strict=True), start=1):
            if norm is not None:
                pair = self.xp.ascontiguousarray(sums[0 : i + 1 : i])
                self.norm.backward_coefficients(pair, pivot=term.pivot, **norm._asdict())

    def values(self, x: Array | Deferred) -> Array:
        """Return `x` itself, or the values of a deferred array: the stored ones, or new ones."""
        if not isinstance(x, Deferred):
            return x
        if x.array is not None:
            return x.array
        out = self.xp.empty(x.shape, x.dtype)
        self.evaluate(x, out=out)
        return out

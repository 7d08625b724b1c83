"""Deferred arrays on a GPU, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydtnn.kernels.cuda.module import CudaKernels, DeviceState, all_of, native, number
from pydtnn.kernels.cuda.norm import CudaNorm
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import fused as reference
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.norm import NormGradient


class CudaFused(CudaKernels, reference.FusedKernels):
    """Elementwise maps as in the reference.

    Coefficients have the type of the arrays, beside 16-bit arrays float32.
    """

    source = "fused"

    def __init__(self, xp: Any, device: DeviceState) -> None:
        super().__init__(xp, device)
        self.norm = CudaNorm(xp, device)

    def evaluate(self, value: Deferred, *, out: Array) -> None:
        """Compute the values into `out`, which may be the array of a term."""
        if not _ready(value, out):
            return super().evaluate(value, out=out)
        terms, arrays = self._terms(value)
        rows, channels = _shape(out)
        name = f"evaluate_{len(arrays)}"
        self.per_channel(name, rows, channels, out, *terms, value.relu, out, arrays=arrays)

    def gate(
        self,
        dy: Array,
        value: Deferred,
        *,
        out: Array,
        sums: Array | None = None,
        add: Array | None = None,
    ) -> None:
        """Compute ``out = dy + add`` where `value` is positive or has no ReLU, and its sums."""
        if not (_ready(value, out, dy, add) and all_of("float64", sums)):
            return super().gate(dy, value, out=out, sums=sums, add=add)
        if sums is None and value.array is not None:  # only the sign is wanted, and it is there
            value = Deferred(Term(value.array), relu=value.relu)
        self._gate(dy, value, (None,) * len(value.terms), out, sums, add)

    def gate_norms(
        self,
        dy: Array,
        value: Deferred,
        norms: Sequence[NormGradient | None],
        *,
        out: Array,
        sums: Array,
    ) -> None:
        """Gate with `sums`, and in the same kernel differentiate the norms of the terms."""
        wanted = [norm for norm in norms if norm is not None]
        tables = [t for n in wanted for t in (n.gamma, n.dgamma, n.dbeta, n.out)]
        taken = _ready(value, out, dy) and all_of(arithmetic(out.dtype), *tables)
        if not (taken and all_of("float64", sums, *[norm.moments for norm in wanted])):
            return super().gate_norms(dy, value, norms, out=out, sums=sums)
        self._gate(dy, value, norms, out, sums, None)

    def _gate(
        self,
        dy: Array,
        value: Deferred,
        norms: Sequence[NormGradient | None],
        out: Array,
        sums: Array | None,
        add: Array | None,
    ) -> None:
        terms, arrays = self._terms(value)
        dy = self.xp.ascontiguousarray(dy)
        add = None if add is None else self.xp.ascontiguousarray(add)
        rows, channels = _shape(out)
        given, loaded = (*terms, value.relu, dy, add, out), (*arrays, dy, add)
        if sums is None:
            name = f"gate_{len(arrays)}"
            return self.per_channel(name, rows, channels, out, *given, arrays=loaded)
        maps = [argument for norm in (*norms, None)[:2] for argument in _map(norm)]
        name, kinds = f"gate_sums_{len(arrays)}", 1 + len(arrays)
        self.summed(name, rows, channels, kinds, out, *given, sums, *maps, arrays=loaded)

    def _terms(self, value: Deferred) -> tuple[list[Any], tuple[Array, ...]]:
        """Arguments of a kernel for a map, and the arrays among them."""
        terms = [Term(self.xp.ascontiguousarray(x), *map_) for x, *map_ in value.terms]
        second = list(terms[1]) if len(terms) > 1 else [None] * 3
        return [*terms[0], *second, value.shift], tuple(term.x for term in terms)


def _map(norm: NormGradient | None) -> tuple[Any, ...]:
    """Arguments of a kernel for what is made of the sums of a term."""
    if norm is None:
        return 0.0, *(None,) * 6, False
    rows, *rest = norm
    return *number(rows), *rest


def _ready(value: Deferred, out: Array, *others: Array | None) -> bool:
    arrays = [term.x for term in value.terms]
    tables = [table for _, *map_ in value.terms for table in map_]
    return native(out, *arrays, *others) and all_of(arithmetic(out.dtype), *tables, value.shift)


def _shape(x: Array) -> tuple[int, int]:
    channels = x.shape[-1]
    return x.size // max(channels, 1), channels

"""Compiled convolutions of one and two axes, and by them of three."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels.autotuner import Autotuner
from pydtnn.kernels.cpu._arrays import share_memory
from pydtnn.kernels.cpu._conv import NUMBERS, ConvKernels, Shape, ready, ready_beside
from pydtnn.kernels.cpu.compiled import FLOAT64, Compiled, beside, contiguous
from pydtnn.kernels.cpu.fused import CpuFused
from pydtnn.kernels.cpu.isa import PAIRING
from pydtnn.kernels.cpu.volumes import Volumes, planes_of
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import conv as reference
from pydtnn.kernels.reference.family import Array

POLYPHASE = ((3, 3), (5, 5), (7, 7))
"""Filters whose phases Winograd's algorithm supports at a stride of 2."""
LINES = {3: "winograd4", 5: "winograd4", 7: "winograd5"}
"""Winograd's algorithms at a stride of 1 for filters of one row or column, by taps."""


@lru_cache(maxsize=1024)
def shape_of(geometry: ConvGeometry) -> Shape | None:
    """A geometry for the compiled kernels; None for three axes, see `Volumes`."""
    return Shape(geometry) if len(geometry.size) <= 2 else None


def is_line(geometry: ConvGeometry) -> bool:
    """Return whether filters have one row or one column."""
    return max(geometry.kernel) == prod(geometry.kernel)


@lru_cache(maxsize=1024)
def candidates(geometry: ConvGeometry, pairs: bool = False) -> tuple[str, ...]:
    """The algorithms that support a geometry, by name; the first supports all.

    Those of volumes are those of their planes. "winograd24", F(2x4), is for processors that
    multiply `pairs` of bfloat16.
    """
    if len(geometry.size) == 3:
        return candidates(planes_of(geometry), pairs)
    if geometry.groups > 1 or max(geometry.dilation) > 1:
        return ("direct",)
    taps = max(geometry.kernel)
    if max(geometry.stride) == 1 and taps in LINES and is_line(geometry):
        return ("direct", LINES[taps])
    if geometry.stride == (1, 1) and geometry.kernel == (5, 5):
        return ("direct", "winograd4")
    if geometry.stride == (1, 1) and geometry.kernel == (3, 3):
        return ("direct", "winograd4", "winograd2", *["winograd24"] * pairs)
    if geometry.stride == (2, 2) and geometry.kernel in POLYPHASE:
        return ("direct", "polyphase")
    return ("direct",)


class CpuConv(Compiled, reference.ConvKernels):
    """Convolutions on the CPU; shapes as in the reference.

    Inputs that are not contiguous are copied. Outputs that are not contiguous and mixed types run
    on the reference. `algorithm` is one of `candidates`; by default that of `autotuner`.

    Attributes
    ----------
    autotuner : Autotuner
        Default algorithm among those that support a geometry.
    """

    table = ConvKernels

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp, isa, threads)
        self.autotuner = Autotuner("direct")
        self.fused = CpuFused(xp, isa, threads)
        self.volumes = Volumes(self)
        self._pairs = isa in PAIRING

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
        shape = shape_of(geometry)
        if shape is None:
            return self.volumes.forward(
                x, w, b, geometry, out=out, relu=relu, store=store, sums=sums, algorithm=algorithm
            )
        if not ready(out, x, w, store) or not _suits(out, b):
            x, w, b = _packed(x), _packed(w), _packed(b)
            if not ready(out, x, w, store) or not _suits(out, b):
                return super().forward(
                    x, w, b, geometry, out=out, relu=relu, store=store, sums=sums
                )
        if store is not None:
            x, store = self._storing(x, store)

        def run(n: int, y: Array) -> None:
            self.kernels.forward(x, w, b, shape, n, y, relu, None, None, self.threads)

        number = self._algorithm("forward", geometry, out, algorithm, lambda: out, run)
        self.kernels.forward(x, w, b, shape, number, out, relu, store, sums, self.threads)

    def takes_sums(
        self, geometry: ConvGeometry, batch: int, dtype: Any, *, bias: bool, relu: bool
    ) -> bool:
        """Return whether `forward` computes sums: not of doubles, which require two parts."""
        return dtype != FLOAT64

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
        """Compute the gradient of the input into `out`, with `CpuFused.gate` applied."""
        shape = shape_of(geometry)
        if shape is None:
            return self.volumes.backward_data(
                dy, w, geometry, out=out, add=add, gate=gate, sums=sums, algorithm=algorithm
            )
        if not ready(out, dy, w, add, gate):
            dy, w, add, gate = _packed(dy), _packed(w), _packed(add), _packed(gate)
            if not ready(out, dy, w, add, gate):
                return super().backward_data(
                    dy, w, geometry, out=out, add=add, gate=gate, sums=sums
                )
        number = self._data_algorithm(dy, w, geometry, shape, out, add, algorithm)
        self.kernels.backward_data(dy, w, shape, number, out, add, gate, sums, self.threads)

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
        shape = shape_of(geometry)
        if shape is None:
            return self.volumes.backward_filter(
                x, dy, geometry, out=out, accumulate=accumulate, algorithm=algorithm
            )
        if not ready_beside(out, x, dy):
            x, dy = _packed(x), _packed(dy)
            if not ready_beside(out, x, dy):
                return super().backward_filter(x, dy, geometry, out=out, accumulate=accumulate)
        number = self._filter_algorithm(x, dy, geometry, shape, out, accumulate, algorithm)
        self.kernels.backward_filter(x, dy, shape, number, out, accumulate, self.threads)

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
        """Compute both gradients; if the filters are small, in one pass over `x` and `dy`.

        `dx` may overlap `x`, which requires another pass, but not `dy`.
        """
        shape = shape_of(geometry)
        if shape is None:
            return self.volumes.backward(
                x,
                dy,
                w,
                geometry,
                dx=dx,
                dw=dw,
                accumulate=accumulate,
                add=add,
                gate=gate,
                sums=sums,
                algorithm=algorithm,
            )
        if not (ready(dx, add, gate) and ready_beside(dw, dx, x, dy, w)):
            self.backward_filter(
                x, dy, geometry, out=dw, accumulate=accumulate, algorithm=algorithm
            )
            return self.backward_data(
                dy, w, geometry, out=dx, add=add, gate=gate, sums=sums, algorithm=algorithm
            )
        filters = self._filter_algorithm(x, dy, geometry, shape, dw, accumulate, algorithm)
        data = self._data_algorithm(dy, w, geometry, shape, dx, add, algorithm, needed=x)
        self.kernels.backward(
            x, dy, w, shape, data, filters, dx, dw, accumulate, add, gate, sums, self.threads
        )

    # -- choice of the algorithm ----------------------------------------------------------------

    def _data_algorithm(
        self,
        dy: Array | Deferred,
        w: Array,
        geometry: ConvGeometry,
        shape: Shape,
        out: Array,
        add: Array | None,
        algorithm: str | None,
        needed: Array | Deferred | None = None,
    ) -> int:
        def run(n: int, dx: Array) -> None:
            self.kernels.backward_data(dy, w, shape, n, dx, None, None, None, self.threads)

        def scratch() -> Array:
            return out if add is None and not _shares(out, needed) else np.empty_like(out)

        return self._algorithm("backward_data", geometry, out, algorithm, scratch, run)

    def _filter_algorithm(
        self,
        x: Array | Deferred,
        dy: Array | Deferred,
        geometry: ConvGeometry,
        shape: Shape,
        out: Array,
        accumulate: bool,
        algorithm: str | None,
    ) -> int:
        def run(n: int, dw: Array) -> None:
            self.kernels.backward_filter(x, dy, shape, n, dw, False, self.threads)

        def scratch() -> Array:
            return np.empty_like(out) if accumulate else out

        return self._algorithm("backward_filter", geometry, x, algorithm, scratch, run)

    def _algorithm(
        self,
        operation: str,
        geometry: ConvGeometry,
        batch: Any,
        name: str | None,
        scratch: Callable[[], Array],
        run: Callable[[int, Array], None],
    ) -> int:
        """Return the number of the algorithm that the caller names, or that `autotuner` chooses.

        Measurements write to `scratch`: the output itself, unless its memory contains an input.
        """
        key = operation, geometry, len(batch), batch.dtype
        if name is None and (name := self.autotuner.resolved.get(key)) is not None:
            return NUMBERS[name]
        known = candidates(geometry, self._pairs and batch.dtype.itemsize == 2)
        if name is None:
            array = scratch()
            name = self.autotuner.pick(*key, known, lambda name: run(NUMBERS[name], array))
        elif name not in known:
            suit = ", ".join(known)
            raise ValueError(f"conv: expected one of {suit} for {geometry}, got {name}")
        return NUMBERS[name]

    def _storing(self, x: Array | Deferred, store: Array) -> tuple[Any, Array | None]:
        """Return the input and the store for a kernel.

        Neighbouring blocks both read the rows between them, so that a store over a term would be
        read as the term.
        """
        if not isinstance(x, Deferred):
            return x, None
        if any(share_memory(store, term.x) for term in x.terms):
            self.fused.evaluate(x, out=store)
            return store, None
        return x, store


def _shares(out: Array, value: Array | Deferred | None) -> bool:
    """Return whether a required value may be stored in the memory of `out`."""
    if value is None:
        return False
    arrays = (
        [*(term.x for term in value.terms), value.array] if isinstance(value, Deferred) else [value]
    )
    return any(array is not None and np.may_share_memory(out, array) for array in arrays)


def _suits(out: Array, bias: Array | None) -> bool:
    """Return whether the kernels support a bias without a copy."""
    return bias is None or (beside(out, bias) and contiguous(bias) is bias)


def _packed(value: Any) -> Any:
    """Return a contiguous copy, or the array itself if it is contiguous; None for None."""
    if not isinstance(value, Deferred):
        return None if value is None else contiguous(value)
    terms = (type(term)(*map(_packed, term)) for term in value.terms)
    packed = value.of_terms(*terms, shift=_packed(value.shift))
    packed.array = _packed(value.array)
    return packed

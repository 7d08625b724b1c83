"""Activations, sums of arrays, and softmax on a GPU."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.layout import THREADS, ceil, flat, team
from pydtnn.kernels.cuda.module import ELEMENTS, CudaKernels, aligned, native, vectors
from pydtnn.kernels.reference import elementwise as reference
from pydtnn.kernels.reference.family import Array

NAMES = frozenset(reference.ACTIVATIONS)
"""Activations that elementwise.cu has."""

FLIGHT = 2
"""Vectors of a thread, as in elementwise.cu."""


class CudaElementwise(CudaKernels, reference.ElementwiseKernels):
    """Activations by name, sums of arrays, and softmax; what a user added runs on the reference."""

    source = "elementwise"

    def forward(self, name: str, x: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Apply activation `name` to `x`; `out` may be `x`."""
        if name not in NAMES or not _alike(out, x):
            return super().forward(name, x, out=out, alpha=alpha)
        self._map(f"{name}_forward", (x,), out, float(alpha))

    def backward(self, name: str, dy: Array, z: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Multiply `dy` by the activation's derivative at `z`; `out` may be `dy`."""
        if name not in NAMES or not _alike(out, dy, z):
            return super().backward(name, dy, z, out=out, alpha=alpha)
        self._map(f"{name}_backward", (dy, z), out, float(alpha))

    def add(self, a: Array, b: Array, *, out: Array) -> None:
        """Compute ``out = a + b``; `out` may be either."""
        if not _alike(out, a, b):
            return super().add(a, b, out=out)
        self._map("add", (a, b), out)

    def convert(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Copy `x` into `out`, or add it, between any two floating types."""
        known = x.dtype.name in ELEMENTS and native(out)
        if not (known and x.shape == out.shape):
            return super().convert(x, out=out, accumulate=accumulate)
        if not out.size:
            return
        x = self.xp.ascontiguousarray(x)
        each, width = 16 // min(x.itemsize, out.itemsize), "wide"
        if not aligned(each, x, out):
            each, width = 1, "single"
        self.launch(
            *(f"convert_{x.dtype.name}_{width}", out.dtype.name),
            *((flat(out.size, each, FLIGHT),), (THREADS,)),
            *(x, out, accumulate, out.size),
            source="convert",
        )

    def softmax_forward(self, x: Array, *, out: Array) -> None:
        """Compute ``exp(x) / sum exp(x)`` over the last axis; `out` may be `x`."""
        if not _alike(out, x):
            return super().softmax_forward(x, out=out)
        self._rows("softmax_forward", (x,), out)

    def softmax_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        """Compute ``dx = y (dy - sum(dy y))`` over the last axis; `out` may be `dy`."""
        if not _alike(out, dy, y):
            return super().softmax_backward(dy, y, out=out)
        self._rows("softmax_backward", (dy, y), out)

    def _map(self, name: str, inputs: tuple[Array, ...], out: Array, *more: Any) -> None:
        if not out.size:
            return
        arrays = [self.xp.ascontiguousarray(x) for x in inputs]
        width, each = vectors(0, out, *arrays)  # what is left over is taken one by one
        grid = (flat(out.size, each, FLIGHT),)
        kernel = f"{name}_{width}"
        self.launch(kernel, out.dtype.name, grid, (THREADS,), *arrays, *more, out, out.size)

    def _rows(self, name: str, inputs: tuple[Array, ...], out: Array) -> None:
        if not out.size:
            return
        columns = out.shape[-1]
        rows = out.size // columns
        arrays = [self.xp.ascontiguousarray(x) for x in inputs]
        width, each = vectors(columns, out, *arrays)
        who, per_block = team(columns // each, len(arrays))
        grid, kernel = (ceil(rows, per_block),), f"{name}_{who}_{width}"
        self.launch(kernel, out.dtype.name, grid, (THREADS,), *arrays, out, rows, columns)


def _alike(out: Array, *inputs: Array) -> bool:
    return native(out, *inputs) and all(x.shape == out.shape for x in inputs)

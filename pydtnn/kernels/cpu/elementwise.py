"""Compiled activations, sums of arrays, and softmax."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._elementwise import NUMBERS, ElementwiseKernels
from pydtnn.kernels.cpu.compiled import (
    Compiled,
    Widened,
    beside,
    contiguous,
    native,
    require,
    supported,
    through_float32,
)
from pydtnn.kernels.number_format import NumberFormat
from pydtnn.kernels.reference import elementwise as reference
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import WORD, Noise


class CpuElementwise(Widened, Compiled, reference.ElementwiseKernels):
    """Activations by name, sums of arrays, and softmax, on the CPU.

    Activations without a compiled kernel run on the reference.
    """

    table = ElementwiseKernels

    def forward(self, name: str, x: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Apply activation `name` to `x`; `out` may be `x`."""
        if name not in NUMBERS or not supported(out, x):
            return super().forward(name, x, out=out, alpha=alpha)
        self.kernels.forward(NUMBERS[name], contiguous(x), out, alpha, self.threads)

    def backward(self, name: str, dy: Array, z: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Multiply `dy` by the activation's derivative at `z`; `out` may be `dy`."""
        require(name in NUMBERS and supported(out, dy, z))
        self.kernels.backward(
            NUMBERS[name], contiguous(dy), contiguous(z), out, alpha, self.threads
        )

    def add(self, a: Array, b: Array, *, out: Array) -> None:
        """Compute ``out = a + b``; `out` may be either."""
        pitched = not (a.flags.c_contiguous and b.flags.c_contiguous) and a.dtype.itemsize > 2
        if pitched or not supported(out, a, b) or not a.shape == b.shape == out.shape:
            return super().add(a, b, out=out)  # NumPy adds views without a copy
        self.kernels.add(contiguous(a), contiguous(b), out, self.threads)

    def convert(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Copy `x` into `out`, or add it: compiled between bfloat16 and float32."""
        if x.shape == out.shape and x.dtype != out.dtype and out.flags.carray:
            if supported(x) and beside(x, out):
                return self.kernels.widen(x, out, accumulate, self.threads)
            if supported(out) and beside(out, x) and not accumulate:
                return self.kernels.narrow(contiguous(x), out, self.threads)
        super().convert(x, out=out, accumulate=accumulate)

    def largest(self, x: Array, rows: int, block: int, *, out: Array) -> None:
        """Find the largest magnitudes of blocks, as bits of finite float32."""
        self.kernels.largest(contiguous(x), rows, block, out, self.threads)

    def hadamard(self, x: Array, signs: Array, *, out: Array, inverse: bool = False) -> None:
        """Multiply each 16 rows by a Hadamard matrix with random signs."""
        self.kernels.hadamard(contiguous(x), contiguous(signs), inverse, out, self.threads)

    def round(
        self,
        x: Array,
        form: NumberFormat,
        peaks: Array,
        rows: int,
        block: int,
        *,
        out: Array,
        noise: Noise | None = None,
    ) -> None:
        """Round to numbers of a format times scales, to nearest even or at random."""
        words = None
        if noise is not None:
            seed, stream, epoch = (part & WORD for part in noise[:3])
            words = seed, stream, epoch, np.require(noise.samples, np.int64, ["C", "A"])
        peaks = contiguous(peaks)
        self.kernels.round(contiguous(x), form.layout, peaks, rows, block, words, out, self.threads)

    @through_float32
    def softmax_forward(self, x: Array, *, out: Array) -> None:
        """Compute ``exp(x) / sum exp(x)`` over the last axis; `out` may be `x`."""
        require(native(out, x))
        self.kernels.softmax_forward(contiguous(x), out, self.threads)

    @through_float32
    def softmax_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        """Compute ``dx = y (dy - sum(dy y))`` over the last axis; `out` may be `dy`."""
        require(native(out, dy, y))
        self.kernels.softmax_backward(contiguous(dy), contiguous(y), out, self.threads)

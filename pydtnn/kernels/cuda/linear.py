"""Fully connected layers on a GPU: products by cuBLAS, biases by kernels of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydtnn.kernels.cuda.module import ELEMENTS, CudaKernels, DeviceState, native
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import linear as reference
from pydtnn.kernels.reference.family import Array


class CudaLinear(CudaKernels, reference.LinearKernels):
    """Fully connected layers; shapes as in the reference.

    Outputs that are not contiguous and mixed types run on the reference. Beside 16-bit arrays,
    biases and the gradients of parameters are of float32.

    Parameters
    ----------
    xp : module
        ``cupy``.
    device : Device
    multiply : callable
        ``multiply(a, b, out, accumulate)``, see `pydtnn.kernels.cuda.cublas.Products`.
    """

    source = "linear"

    def __init__(
        self, xp: Any, device: DeviceState, multiply: Callable[[Array, Array, Array, bool], None]
    ) -> None:
        super().__init__(xp, device)
        self._multiply = multiply

    def forward(self, x: Array, w: Array, b: Array | None, *, out: Array) -> None:
        """Compute ``out = x w' + b``."""
        if not (native(out, x, w) and (b is None or b.dtype == arithmetic(out.dtype))):
            return super().forward(x, w, b, out=out)
        x, w = map(self.xp.ascontiguousarray, (x, w))
        self._multiply(x, w.T, out, False)
        if b is not None:
            bias = self.xp.ascontiguousarray(b)
            self.per_channel("add_bias", *out.shape, out, bias, out, arrays=(bias,))

    def backward_data(self, dy: Array, w: Array, *, out: Array) -> None:
        """Compute ``dx = dy w`` into `out` (N, I)."""
        if not native(out, dy, w):
            return super().backward_data(dy, w, out=out)
        dy, w = map(self.xp.ascontiguousarray, (dy, w))
        self._multiply(dy, w, out, False)

    def backward_filter(self, x: Array, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute ``dw = dy' x`` into `out` (O, I)."""
        if x.dtype != dy.dtype or not (native(out, x) or _gradient(out, x)):
            return super().backward_filter(x, dy, out=out, accumulate=accumulate)
        if not len(x):  # a product over nothing is not a product to cuBLAS
            return self.store(0, out, accumulate)
        x, dy = map(self.xp.ascontiguousarray, (x, dy))
        self._multiply(dy.T, x, out, accumulate)

    def backward_bias(self, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Sum `dy` (..., C) over all axes but the last into `out` (C,)."""
        if not _gradient(out, dy) or not dy.size:
            return super().backward_bias(dy, out=out, accumulate=accumulate)
        dy, channels = self.xp.ascontiguousarray(dy), dy.shape[-1]
        self.summed("backward_bias", dy.size // channels, channels, 1, dy, *(dy, out, accumulate))


def _gradient(out: Array, x: Array) -> bool:
    """Whether `out` can be the gradient of a parameter: of the type that `x` is computed with."""
    known = x.dtype.name in ELEMENTS
    return known and out.flags.c_contiguous and out.dtype == arithmetic(x.dtype)

"""Kernels without a variant for bfloat16, on copies of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from pydtnn.kernels.cpu._elementwise import ElementwiseKernels
from pydtnn.kernels.cpu.compiled import HALF, contiguous, supported
from pydtnn.kernels.cpu.isa import number
from pydtnn.kernels.reference.family import Array


class Widened:
    """Mixin for a compiled family: conversions between bfloat16 and float32."""

    threads: int

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp, isa, threads)  # type: ignore[call-arg]  # the family follows
        self._conversions = ElementwiseKernels(number(isa))

    def widened(self, value: Any) -> Any:
        """Return a float32 copy of an array of bfloat16, and other values as they are."""
        if not isinstance(value, np.ndarray) or value.dtype != HALF:
            return value
        copy = np.empty(value.shape, np.float32)
        self._conversions.widen(contiguous(value), copy, False, self.threads)
        return copy

    def narrow(self, value: Array, out: Array) -> None:
        """Round a float32 array into one of bfloat16."""
        self._conversions.narrow(value, out, self.threads)


def through_float32(kernel: Callable[..., None]) -> Callable[..., None]:
    """Decorate a kernel of a `Widened` family: arrays of bfloat16 are copied, and `out` rounded."""

    @wraps(kernel)
    def call(self: Any, *arguments: Any, out: Array, **options: Any) -> None:
        if out.dtype != HALF or not supported(out):
            return kernel(self, *arguments, out=out, **options)
        result = np.empty(out.shape, np.float32)
        kernel(self, *map(self.widened, arguments), out=result, **options)
        self.narrow(result, out)

    return call

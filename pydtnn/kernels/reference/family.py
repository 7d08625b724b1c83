"""Base class of all families of kernels."""

from __future__ import annotations

from typing import Any

Array = Any
"""A ``numpy.ndarray`` or an array of the backend's module."""

Number = Any
"""A number, or an array of one float64 in the backend's memory, which the host does not read."""


def wide(x: Array) -> Array:
    """Convert an array of 16-bit floats to float32 for computation; return others unchanged."""
    return x.astype("float32") if x.dtype.itemsize == 2 else x


class KernelFamily:
    """Kernels of one kind over the arrays of module ``xp``."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @staticmethod
    def store(value: Array, out: Array, accumulate: bool) -> None:
        """Write `value` into `out`, or add it."""
        if accumulate:
            out += value
        else:
            out[...] = value

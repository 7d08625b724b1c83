"""In-place sum of two arrays: the reference in NumPy and the selection of the fastest function.

Compiled code (`_sum.pyx`, `src/sum.c`) is used for the element types of gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

try:
    import pydtnn.comm._sum as _sum
except ImportError:  # not compiled: NumPy is used for all types
    _sum = None

Adder = Callable[[np.ndarray, np.ndarray], object]
"""Adds its second argument, an array, to the first one in place."""

COMPILED = ("float32", "float64", "float16", "bfloat16")
"""Names of the element types for which compiled code is used."""


def adder_for(dtype: np.dtype) -> Adder:
    """Return the fastest function that adds contiguous arrays of an element type in place.

    Parameters
    ----------
    dtype : numpy.dtype
        A native integer or float type, or bfloat16 of the package ml_dtypes.
    """
    if _sum is not None and dtype.name in COMPILED:
        adder: Adder = _sum.Adder(dtype.name)
        return adder
    return add


def add(into: np.ndarray, other: np.ndarray) -> None:
    """Add `other` to `into` in place: the reference.

    Floats of 16 bits are added in float32, and the sum is rounded to nearest (ties to even). An
    overflow gives infinity without a warning, as in compiled code.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if into.dtype.name in ("float16", "bfloat16"):
            into[...] = into.astype(np.float32) + other.astype(np.float32)
        else:
            np.add(into, other, out=into)

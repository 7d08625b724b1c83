"""The sum of two arrays, as ranks need it: the reference in NumPy, and who does it faster.

Compiled (`_sum.pyx`, `src/sum.c`) for the types in which gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

try:
    import pydtnn.comm._sum as _sum
except ImportError:  # not built: NumPy does it all
    _sum = None

Adder = Callable[[np.ndarray, np.ndarray], object]
"""Adds its second argument, an array, to the first."""

COMPILED = ("float32", "float64", "float16", "bfloat16")
"""Names of the types that are added by compiled code."""


def adder_for(dtype: np.dtype) -> Adder:
    """Choose what adds contiguous arrays of a type, in place.

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
    """Add `other` to `into`: the reference.

    Floats of 16 bits are added in float32, and the sum rounded to the nearest (ties to even). What
    is too large becomes infinite without a warning, as it does in compiled code.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if into.dtype.name in ("float16", "bfloat16"):
            into[...] = into.astype(np.float32) + other.astype(np.float32)
        else:
            np.add(into, other, out=into)

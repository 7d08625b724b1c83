"""Types of elements: what arrays are stored in, and what their elements are computed with."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" the name of a NumPy dtype
import numpy as np

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""What a model may store its activations in."""


def arithmetic(dtype: Any) -> np.dtype:
    """Return the type that elements of a type are computed with.

    That is the type itself, or float32 for the types of 16 bits: these save memory and bandwidth,
    but a sum of a few hundred of them is no longer one. Coefficients, biases, gradients of
    parameters and master weights beside 16-bit arrays have this type too.

    >>> arithmetic("bfloat16"), arithmetic("float64")
    (dtype('float32'), dtype('float64'))
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype

"""Element types of storage and of computation."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" the name of a NumPy dtype
import numpy as np

from pydtnn.utils.names import answer

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Types of a model's activations."""


def name_of(dtype: Any) -> str:
    """Return the name of a model's dtype, given as a name or a NumPy dtype.

    >>> name_of(np.float32), name_of("bfloat16")
    ('float32', 'bfloat16')

    Raises
    ------
    ValueError
        If it is none of `DTYPES`.
    """
    key = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if key in DTYPES:
        return key
    raise ValueError(
        f"Model: dtype must be one of {', '.join(DTYPES)}, got {dtype}{answer('values', key)}"
    )


def arithmetic(dtype: Any) -> np.dtype:
    """Return the type in which elements of a type are computed.

    That is the type itself, or float32 for the types of 16 bits: these save memory and bandwidth,
    but a sum of a few hundred of them is inaccurate. Coefficients, biases, gradients of parameters
    and master weights beside 16-bit arrays have this type too.

    >>> arithmetic("bfloat16"), arithmetic("float64")
    (dtype('float32'), dtype('float64'))
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype

"""Compression of gradients to floating-point numbers of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.compression.compressor import (
    CompressedSums,
    Compressor,
    Context,
    Parts,
    is_finite,
)
from pydtnn.utils.validate import check_float

SumsOf = Callable[[Communicator], CompressedSums]


def float16(*, scale: float = 1.0, feedback: bool = False, seed: int = 0) -> SumsOf:
    """Send float16: 5 bits of exponent, 10 of mantissa. Sums are computed in that type.

    Finite values and their sums stay finite: the values of each of P ranks are clipped to 65504 / P
    or slightly less, ``65504 / P / (1 + 2**-11)**(P - 1)``, as partial sums may be rounded up.
    Infinite values and NaN are preserved. Numbers below 6.1e-5 lose precision and those below 3e-8
    become 0; `scale` shifts these limits.

    Parameters
    ----------
    scale : float
        Factor on gradients in messages; a power of two is exact.
    feedback, seed
        See `Compressor`. The rounding error of a rank's gradients is fed back; that of the
        additions, at most ``2**-11`` of a partial sum each, is not.
    """
    scale = check_float("float16", "scale", scale, at_least=1e-30, at_most=1e30)
    return partial(_added, np.dtype("float16"), scale, feedback, seed)


def bfloat16(*, feedback: bool = False, seed: int = 0) -> SumsOf:
    """Send bfloat16: the range of float32, 7 bits of mantissa.

    Finite values stay finite, as in `float16`.

    Parameters
    ----------
    feedback, seed
        As in `float16`, with an error of at most ``2**-8`` of a partial sum in each addition.
    """
    from ml_dtypes import bfloat16 as dtype

    return partial(_added, np.dtype(dtype), 1.0, feedback, seed)


def _added(
    dtype: np.dtype, scale: float, feedback: bool, seed: int, comm: Communicator
) -> CompressedSums:
    """Create sums of floats, which the communicator adds with type `dtype`."""
    limit = _limit(dtype, comm.size)
    half = dtype == np.dtype("float16")
    values_of = {np.dtype(name): _HALVES.astype(name) for name in ("float32", "float64") if half}

    def compress(x: np.ndarray, context: Context) -> Parts:
        x = _scaled(bounded(x, limit / scale), scale)
        return (_as_float16(x) if half else x.astype(dtype),)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        (sums,) = parts
        if half:
            values = np.take(values_of[out.dtype], sums.view(np.uint16))
        else:
            values = sums.astype(out.dtype)
        out += _scaled(values, 1 / scale)

    return CompressedSums(
        comm, Compressor(compress, restore, feedback=feedback, adds=True, seed=seed)
    )


_HALVES = np.arange(2**16, dtype="uint16").view("float16")
"""All numbers of float16; NumPy's conversion is ten times slower if most are subnormal."""

CHUNK_ELEMENTS = 2**15
"""Elements that are rounded at a time; small enough for intermediate results to stay in cache."""


def _as_float16(x: np.ndarray) -> np.ndarray:
    """Round float32 or float64 to float16, to nearest, ties to even, as ``astype`` does.

    For ``2**E <= |x| < 2**(E + 1)`` the result is a multiple of ``2**(E - 10)``. With M mantissa
    bits in the type of `x`, these are exactly the numbers of that type between ``c = 2**(E - 10 +
    M)`` and ``2 c``: the low bits of ``|x| + c`` are the rounded mantissa, and for subnormal
    results `E` is bounded below. No intermediate result is subnormal in the type of `x`.
    """
    if not is_finite(x):
        return x.astype("float16")
    kind: Any = np.uint32 if x.itemsize == 4 else np.uint64
    bits = 23 if x.itemsize == 4 else 52
    bias, sign = (1 << (8 * x.itemsize - 2 - bits)) - 1, kind(1 << (8 * x.itemsize - 1))
    lowest, exponents = kind((bias - 14) << bits), kind((2 * bias + 1) << bits)
    rounded = np.empty(x.size, np.uint16)
    for start in range(0, x.size, CHUNK_ELEMENTS):
        part = x[start : start + CHUNK_ELEMENTS].view(kind)
        magnitude = part & (sign - kind(1))
        exponent = np.maximum(magnitude & exponents, lowest)
        c = (exponent + kind((bits - 10) << bits)).view(x.dtype)
        codes = (magnitude.view(x.dtype) + c).view(kind) & kind((1 << bits) - 1)
        # |x| / 2**(E - 10) contains the leading 1, which compensates for codes of exponents that
        # start at 1; if rounding reaches 2**(E + 1), it carries into the exponent.
        codes += (exponent - lowest) >> kind(bits - 10)
        codes |= (part & sign) >> kind(8 * x.itemsize - 16)
        rounded[start : start + CHUNK_ELEMENTS] = codes
    return rounded.view(np.float16)


def _limit(dtype: np.dtype, size: int) -> float:
    """Return the limit on values of a type so that the sum of `size` is finite, in any order.

    Rounding is monotonic, so values up to the limit have at most the sum of `size` times the limit.
    Each of the ``size - 1`` additions increases it by at most half a unit in the last place.
    """
    mantissa, highest = (10, 15) if dtype == np.dtype("float16") else (7, 127)
    largest = (2 - 2.0**-mantissa) * 2.0**highest
    limit = largest / size / (1 + 2.0 ** -(mantissa + 1)) ** (size - 1)
    unit = math.ldexp(1.0, math.frexp(limit)[1] - 1 - mantissa)
    return math.floor(limit / unit) * unit


def _scaled(x: np.ndarray, scale: float) -> np.ndarray:
    return x if scale == 1 else x * x.dtype.type(scale)


def bounded(x: np.ndarray, limit: float) -> np.ndarray:
    """Return `x` with finite values clipped to ``[-limit, limit]``."""
    if np.max(x) <= limit and np.min(x) >= -limit:  # both are false if there is a NaN
        return x
    return np.where(np.isfinite(x), np.clip(x, -limit, limit), x)

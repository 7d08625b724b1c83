"""Compression of gradients to floating-point numbers of fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.compression.bits import pack_bits, unpack_bits
from pydtnn.parallel.compression.compressor import CompressedSums, Compressor, Parts
from pydtnn.parallel.compression.context import Context
from pydtnn.parallel.compression.formats import Format
from pydtnn.utils.validate import number

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
    scale = number("float16", "scale", scale, at_least=1e-30, at_most=1e30)
    return partial(_added, Format(5, 10), np.dtype("float16"), scale, feedback, seed)


def bfloat16(*, feedback: bool = False, seed: int = 0) -> SumsOf:
    """Send bfloat16: the range of float32, 7 bits of mantissa.

    Finite values stay finite, as in `float16`.

    Parameters
    ----------
    feedback, seed
        As in `float16`, with an error of at most ``2**-8`` of a partial sum in each addition.
    """
    from ml_dtypes import bfloat16 as dtype

    return partial(_added, Format(8, 7), np.dtype(dtype), 1.0, feedback, seed)


def _added(
    form: Format,
    dtype: np.dtype,
    scale: float,
    feedback: bool,
    seed: int,
    comm: Communicator,
) -> CompressedSums:
    """Create sums of floats of a format, which the communicator adds with type `dtype`."""
    limit = _limit(form, comm.size)
    by_numpy = dtype != np.dtype("float16")  # ten times slower if most are subnormal

    def compress(x: np.ndarray, context: Context) -> Parts:
        x = _scaled(bounded(x, limit / scale), scale)
        return (x.astype(dtype) if by_numpy else form.encode(x).view(dtype),)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        (sums,) = parts
        if by_numpy:
            values = sums.astype(out.dtype)
        else:
            values = form.decode(sums.view(np.uint16), out.dtype)
        out += _scaled(values, 1 / scale)

    return CompressedSums(
        comm, Compressor(compress, restore, feedback=feedback, adds=True, seed=seed)
    )


def _limit(form: Format, size: int) -> float:
    """Return the limit on values of a format so that the sum of `size` is finite, in any order.

    Rounding is monotonic, so values up to the limit have at most the sum of `size` times the limit.
    Each of the ``size - 1`` additions increases it by at most half a unit in the last place.
    """
    limit = form.largest / size / (1 + 2.0 ** -(form.mantissa + 1)) ** (size - 1)
    nearest = float(form.decode(form.encode(np.array([limit])), np.dtype("float64"))[0])
    unit = math.ldexp(1.0, math.frexp(nearest)[1] - 1 - form.mantissa)
    return nearest if nearest <= limit else nearest - unit


def _scaled(x: np.ndarray, scale: float) -> np.ndarray:
    return x if scale == 1 else x * x.dtype.type(scale)


def bounded(x: np.ndarray, limit: float) -> np.ndarray:
    """Return `x` with finite values clipped to ``[-limit, limit]``."""
    if np.max(x) <= limit and np.min(x) >= -limit:  # both are false if there is a NaN
        return x
    return np.where(np.isfinite(x), np.clip(x, -limit, limit), x)


def any_float(
    exponent: int, mantissa: int, *, scaled: bool = True, feedback: bool = False, seed: int = 0
) -> Compressor:
    """Send floats of `exponent` and `mantissa` bits and a sign, packed without gaps.

    Finite values stay finite: they are clipped to the largest number of the format. Infinite values
    and NaN are preserved.

    Parameters
    ----------
    exponent, mantissa : int
        Numbers of bits; see `Format`.
    scaled : bool
        Whether each rank multiplies a bucket's gradients by the power of two that moves the
        largest to the upper end of the format's range, and sends the exponent, too. Otherwise most
        gradients underflow in formats with few exponent bits: the smallest number of (4, 3) is
        0.002.
    feedback, seed
        See `Compressor`.
    """
    form = Format(exponent, mantissa)

    def compress(x: np.ndarray, context: Context) -> Parts:
        power = _power(x, form) if scaled else 0
        codes = form.encode(_times_power(x, power))
        return pack_bits(codes, form.width), np.array([power], "int16")

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        codes = unpack_bits(parts[0], form.width, out.size)
        out += _times_power(form.decode(codes, out.dtype), -int(parts[1][0]))

    return Compressor(compress, restore, feedback=feedback, seed=seed)


def _power(x: np.ndarray, form: Format) -> int:
    """Return the largest exponent e for which ``2**e |x|`` is below ``2**(bias + 1)``."""
    greatest = float(max(np.max(x), -np.min(x)))
    if not 0 < greatest < math.inf:
        return 0
    return form.bias + 1 - math.frexp(greatest)[1]  # 2**(e - 1) <= greatest < 2**e


def _times_power(x: np.ndarray, power: int) -> np.ndarray:
    """Return ``x 2**power``, by a slower method if ``2**power`` is out of range."""
    return _scaled(x, 2.0**power) if abs(power) <= 126 else np.ldexp(x, power)

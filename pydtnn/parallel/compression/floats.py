"""Gradients as shorter floating-point numbers."""

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
    """Send halves: 5 bits of exponent, 10 of mantissa. They are added in that type.

    What is finite stays so, also in the sum: the values of each of P ranks end at 65504 / P, or a
    little below, at ``65504 / P / (1 + 2**-11)**(P - 1)``, as partial sums may be rounded up. What
    is infinite or NaN stays so. Numbers below 6.1e-5 lose precision and those below 3e-8 are 0;
    `scale` moves that.

    Parameters
    ----------
    scale : float
        What gradients are multiplied by on the way; a power of two is exact.
    feedback, seed
        See `Compressor`. What a rank rounds off is fed back; what the additions round off, at most
        ``2**-11`` of a partial sum each, is lost.
    """
    scale = number("float16", "scale", scale, at_least=1e-30, at_most=1e30)
    return partial(_added, Format(5, 10), np.dtype("float16"), scale, feedback, seed)


def bfloat16(*, feedback: bool = False, seed: int = 0) -> SumsOf:
    """Send bfloat16: as large and as small as float32, 7 bits of mantissa.

    What is finite stays so, as in `float16`.

    Parameters
    ----------
    feedback, seed
        As in `float16`, with at most ``2**-8`` of a partial sum lost in each addition.
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
    """Make sums of floats of a format, which the communicator adds as elements of type `dtype`."""
    limit = _limit(form, comm.size)
    by_numpy = dtype != np.dtype("float16")  # ten times as slow where most are subnormal

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
    """Return a number of the format of which `size` add up to a finite one, in whatever order.

    Rounding is monotonic, so no values up to the limit have a larger sum than the limit itself
    taken `size` times. Each of the ``size - 1`` additions makes it larger by at most half a unit of
    the last place.
    """
    limit = form.largest / size / (1 + 2.0 ** -(form.mantissa + 1)) ** (size - 1)
    nearest = float(form.decode(form.encode(np.array([limit])), np.dtype("float64"))[0])
    unit = math.ldexp(1.0, math.frexp(nearest)[1] - 1 - form.mantissa)
    return nearest if nearest <= limit else nearest - unit


def _scaled(x: np.ndarray, scale: float) -> np.ndarray:
    return x if scale == 1 else x * x.dtype.type(scale)


def bounded(x: np.ndarray, limit: float) -> np.ndarray:
    """Return `x` with what is finite at most `limit`."""
    if np.max(x) <= limit and np.min(x) >= -limit:  # neither, if there is a NaN
        return x
    return np.where(np.isfinite(x), np.clip(x, -limit, limit), x)


def any_float(
    exponent: int, mantissa: int, *, scaled: bool = True, feedback: bool = False, seed: int = 0
) -> Compressor:
    """Send floats of `exponent` and `mantissa` bits and a sign, packed without a gap.

    What is finite stays so: it ends at the largest number of the format. What is infinite or NaN
    stays so.

    Parameters
    ----------
    exponent, mantissa : int
        Bits, see `Format`.
    scaled : bool
        Whether each rank multiplies a bucket's gradients by the power of two that brings the
        greatest to the top of the format, and sends that, too. Without, formats with few exponent
        bits have nothing so small as a gradient: of (4, 3) the smallest number is 0.002.
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
    """The greatest power of two by which `x` stays below twice the greatest power of a format."""
    greatest = float(max(np.max(x), -np.min(x)))
    if not 0 < greatest < math.inf:
        return 0
    return form.bias + 1 - math.frexp(greatest)[1]  # 2**(e - 1) <= greatest < 2**e


def _times_power(x: np.ndarray, power: int) -> np.ndarray:
    """Return ``x 2**power``; also where the power itself would not be finite, which is slower."""
    return _scaled(x, 2.0**power) if abs(power) <= 126 else np.ldexp(x, power)

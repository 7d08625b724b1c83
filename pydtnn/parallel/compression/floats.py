"""Compression of gradients to floating-point numbers of fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.number_format import NumberFormat
from pydtnn.kernels.reference.elementwise import ElementwiseKernels
from pydtnn.kernels.reference.random import Noise, stream
from pydtnn.parallel.compression.compressor import CompressedSums, Compressor, Context, Parts
from pydtnn.parallel.compression.quantised import BlockRanges, blocks
from pydtnn.utils.validate import check_float, check_int


def pack_bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Pack codes without gaps, the most significant bit first; 8, 16 or 32 bits are unchanged.

    Eight codes occupy `width` bytes. Codes are therefore processed in rows of eight, and each
    column of bytes is computed from the few columns of codes that overlap it.

    Parameters
    ----------
    codes : ndarray (n,) of unsigned integers below ``2**width``
    width : int
        Bits per code, 1 to 32.

    Returns
    -------
    ndarray (ceil(n width / 8),) of uint8

    Examples
    --------
    >>> [f"{byte:08b}" for byte in pack_bits(np.array([0b101, 0b110, 0b001], "uint8"), 3)]
    ['10111000', '10000000']
    """
    if width in (8, 16, 32):
        return codes.astype(code_type(width), copy=False).view(np.uint8)
    rows = np.zeros((-(-codes.size // 8), 8), codes.dtype)
    rows.reshape(-1)[: codes.size] = codes
    packed = np.zeros((len(rows), width), np.uint8)
    for byte, column, left in _overlaps(width):
        shifted = rows[:, column] << left if left >= 0 else rows[:, column] >> -left
        packed[:, byte] |= shifted.astype(np.uint8)  # keeps the lowest 8 bits
    return packed.reshape(-1)[: -(-codes.size * width // 8)]


def unpack_bits(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Return the `count` packed codes in the smallest sufficient unsigned integer type."""
    dtype = code_type(width)
    if width in (8, 16, 32):
        return packed.view(dtype)
    bytes_ = np.zeros((-(-count // 8), width), np.uint8)
    bytes_.reshape(-1)[: packed.size] = packed
    rows = np.zeros((len(bytes_), 8), dtype)
    for byte, column, left in _overlaps(width):
        whole = bytes_[:, byte].astype(dtype)
        rows[:, column] |= whole >> left if left >= 0 else whole << -left
    rows &= dtype.type(2**width - 1)
    return rows.reshape(-1)[:count]


def code_type(width: int) -> np.dtype:
    """Return the smallest unsigned integer type of at least `width` bits."""
    return np.dtype("uint8" if width <= 8 else "uint16" if width <= 16 else "uint32")


def _overlaps(width: int) -> list[tuple[int, int, int]]:
    """Return the pairs of byte and code of a row that share bits, and the shift to the left.

    Code `column` is bits ``[width column, width (column + 1))`` of the row, byte `byte` is bits
    ``[8 byte, 8 byte + 8)``; a left shift by the difference of their ends aligns the two.
    """
    return [
        (byte, column, 8 * (byte + 1) - width * (column + 1))
        for byte in range(width)
        for column in range(8 * byte // width, min(-(-8 * (byte + 1) // width), 8))
    ]


CHUNK_ELEMENTS = 2**15
"""Elements that are encoded at a time; small enough for intermediate results to stay in cache."""


class _FloatLayout(NamedTuple):
    """Layout of a floating-point type of the machine."""

    integer: type[np.unsignedinteger]
    mantissa: int
    bias: int


_MACHINE: dict[np.dtype, _FloatLayout] = {
    np.dtype("float32"): _FloatLayout(np.uint32, 23, 127),
    np.dtype("float64"): _FloatLayout(np.uint64, 52, 1023),
}


class CodedFormat(NumberFormat):
    """A format with its codes.

    Values are rounded to nearest, ties to even, by an addition: for ``2**E <= |x| < 2**(E + 1)``
    the result is a multiple of ``2**(E - m)``. With M mantissa bits in the machine's type, these
    are exactly the numbers of that type between ``c = 2**(E - m + M)`` and ``2 c``: the low bits of
    ``|x| + c`` are the rounded mantissa, and for subnormal results `E` is bounded below. No
    intermediate result is a subnormal number of the machine's type, with which processors may be
    slow.

    A finite format may have no code for infinite values and NaN, which become the largest number.
    """

    @property
    def infinity(self) -> int:
        """Code of infinity; those of finite numbers are below, those of NaN above.

        Of a finite format, the first code without a number.
        """
        if self.finite:
            return (1 << (self.width - 1)) - (self.width >= 8)
        return (2**self.exponent - 1) << self.mantissa

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Round to the nearest code; finite values are clipped to `largest`.

        Parameters
        ----------
        x : ndarray of float32 or float64

        Returns
        -------
        ndarray of uint8, uint16 or uint32
            The smallest type that holds a code.
        """
        codes = np.empty(x.size, code_type(self.width))
        for start in range(0, x.size, CHUNK_ELEMENTS):
            codes[start : start + CHUNK_ELEMENTS] = self._encode(x[start : start + CHUNK_ELEMENTS])
        return codes

    def _encode(self, x: np.ndarray) -> np.ndarray:
        machine = _MACHINE[x.dtype]
        integer, sign = machine.integer, machine.integer(1 << (8 * x.itemsize - 1))
        magnitude = x.view(integer) & (sign - integer(1))
        drop = machine.mantissa - self.mantissa
        if self.bias == machine.bias:  # same exponents: round the dropped bits as an integer
            odd = (magnitude >> integer(drop)) & integer(1)
            codes = (magnitude + odd + integer((1 << (drop - 1)) - 1)) >> integer(drop)
        else:
            lowest = integer((machine.bias - self.bias + 1) << machine.mantissa)
            exponents = integer((2 * machine.bias + 1) << machine.mantissa)
            exponent = np.maximum(magnitude & exponents, lowest)
            with np.errstate(over="ignore", invalid="ignore"):
                c = (exponent + integer(drop << machine.mantissa)).view(x.dtype)
                rounded = (magnitude.view(x.dtype) + c).view(integer)
            # |x| / 2**(E - m) contains the leading 1, which compensates for codes of exponents
            # that start at 1; if rounding reaches 2**(E + 1), it carries into the exponent.
            codes = rounded & integer((1 << machine.mantissa) - 1)
            codes += (exponent - lowest) >> integer(drop)
        largest = float(np.max(magnitude.view(x.dtype), initial=0))
        if not largest <= self.largest:
            codes = self._out_of_range(codes, magnitude.view(x.dtype))
        negative = (x.view(integer) & sign) >> integer(8 * x.itemsize - self.width)
        return codes | negative

    def _out_of_range(self, codes: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
        """Correct the codes of values that are not finite or larger than `largest`."""
        codes = np.where(magnitude > self.largest, self.infinity - 1, codes)
        if self.finite:
            return np.where(np.isnan(magnitude), self.infinity - 1, codes)
        codes = np.where(np.isinf(magnitude), self.infinity, codes)
        codes = np.where(np.isnan(magnitude), self.infinity + 1, codes)
        return codes

    def decode(self, codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the exact values of codes as float32 or float64."""
        if self.width <= 16:
            return np.take(self._tables[dtype], codes)
        return self._decode(codes, dtype)

    def _decode(self, codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
        machine = _MACHINE[dtype]
        integer = machine.integer
        drop = integer(machine.mantissa - self.mantissa)
        wide = codes.astype(integer)
        magnitude = wide & integer((1 << (self.width - 1)) - 1)
        if self.bias == machine.bias:
            values = (magnitude << drop).view(dtype)
        else:
            exponent = np.maximum(magnitude >> integer(self.mantissa), integer(1))
            multiple = magnitude - ((exponent - integer(1)) << integer(self.mantissa))
            exponent += integer(machine.bias - self.bias - self.mantissa)
            unit = (exponent << integer(machine.mantissa)).view(dtype)
            values = multiple.astype(dtype) * unit
            values[magnitude == self.infinity] = np.nan if self.finite else np.inf
            values[magnitude > self.infinity] = np.nan
        signs = wide >> integer(self.width - 1)
        values.view(integer)[...] |= signs << integer(8 * dtype.itemsize - 1)
        return values

    @cached_property
    def _tables(self) -> dict[np.dtype, np.ndarray]:
        """Values of all codes, for codes of at most 16 bits."""
        codes = np.arange(2**self.width, dtype="uint32")
        return {dtype: self._decode(codes, dtype) for dtype in _MACHINE}


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
    return partial(_added, CodedFormat(5, 10), np.dtype("float16"), scale, feedback, seed)


def bfloat16(*, feedback: bool = False, seed: int = 0) -> SumsOf:
    """Send bfloat16: the range of float32, 7 bits of mantissa.

    Finite values stay finite, as in `float16`.

    Parameters
    ----------
    feedback, seed
        As in `float16`, with an error of at most ``2**-8`` of a partial sum in each addition.
    """
    from ml_dtypes import bfloat16 as dtype

    return partial(_added, CodedFormat(8, 7), np.dtype(dtype), 1.0, feedback, seed)


def _added(
    form: CodedFormat,
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


def _limit(form: CodedFormat, size: int) -> float:
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


NOT_FINITE = -128
"""In the place of the exponent of a block that has infinite values or NaN."""


def any_float(
    exponent: int,
    mantissa: int,
    *,
    finite: bool = False,
    scaled: bool = True,
    block: int | None = None,
    stochastic: bool = False,
    feedback: bool = False,
    seed: int = 0,
) -> Compressor:
    """Send floats of `exponent` and `mantissa` bits and a sign, packed without gaps.

    Finite values stay finite: they are clipped to the largest number of the format. Infinite values
    and NaN are preserved; in finite formats and in blocks, all values of the block become NaN.

    Parameters
    ----------
    exponent, mantissa, finite
        See `NumberFormat`.
    scaled : bool
        Whether each rank multiplies a bucket's gradients by the power of two that moves the
        largest to the upper end of the format's range, and sends the exponent, too. Otherwise most
        gradients underflow in formats with few exponent bits: the smallest number of (4, 3) is
        0.002.
    block : int, optional
        Maximum number of neighbours in a parameter with a power of their own, in 8 bits.
    stochastic : bool
        Whether values are rounded up or down at random, without bias.
    feedback, seed
        See `Compressor`.
    """
    form = CodedFormat(exponent, mantissa, finite)
    if block is not None:
        block = check_int("float", "block", block, at_least=2)
        if not scaled:
            raise ValueError("float: blocks have a power of two each; omit block or scaled=False")

    def lengths_of(x: np.ndarray, context: Context) -> BlockRanges:
        return blocks(context.sizes, block) if block else blocks((x.size,), x.size)

    def compress(x: np.ndarray, context: Context) -> Parts:
        starts, lengths = lengths_of(x, context)
        powers = _powers(x, starts, form) if scaled else np.zeros(len(starts), "int16")
        if block:
            powers = np.clip(powers, NOT_FINITE + 1, 127)
        scaled_x = _times_powers(x, powers, lengths)
        if stochastic:
            scaled_x = _at_random(scaled_x, form, context)
        if block or finite:
            bad = ~np.logical_and.reduceat(np.isfinite(x), starts)
            powers = np.where(bad, NOT_FINITE, powers)
        codes = form.encode(scaled_x)
        return pack_bits(codes, form.width), powers.astype("int8" if block else "int16")

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        codes, powers = unpack_bits(parts[0], form.width, out.size), parts[1].astype("int16")
        lengths = lengths_of(out, context).lengths
        values = _times_powers(form.decode(codes, out.dtype), -powers, lengths)
        if (block or finite) and (powers == NOT_FINITE).any():
            values = np.where(np.repeat(powers == NOT_FINITE, lengths), np.nan, values)
        out += values

    return Compressor(compress, restore, feedback=feedback, seed=seed)


def _powers(x: np.ndarray, starts: np.ndarray, form: CodedFormat) -> np.ndarray:
    """Return, of each block, the largest e for which ``2**e |x|`` is below twice the highest power.

    The highest power of two of the format, that is; 0 for blocks of zeros and not finite ones.
    """
    greatest = np.maximum.reduceat(np.abs(x), starts)
    usable = (greatest > 0) & np.isfinite(greatest)
    exponents = np.frexp(np.where(usable, greatest, 1))[1]  # 2**(e - 1) <= greatest < 2**e
    return np.where(usable, form.highest + 1 - exponents, 0).astype("int16")


def _times_powers(x: np.ndarray, powers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``x 2**power`` of each block, by a slower method if a power is out of range."""
    if len(powers) == 1 and abs(int(powers[0])) <= 126:
        return _scaled(x, 2.0 ** int(powers[0]))
    return np.ldexp(x, np.repeat(powers.astype("int32"), lengths))


def _at_random(x: np.ndarray, form: CodedFormat, context: Context) -> np.ndarray:
    """Round float32 values to numbers of a format, up or down at random."""
    rounded = np.empty((1, x.size), "float32")
    sample = np.array([context.bucket << 32 | context.rank])
    noise = Noise(context.seed, stream("messages"), context.step, sample)
    peak = np.full((1, 1), form.highest)
    REFERENCE.round(x.astype("float32")[None], form, peak, 1, out=rounded, noise=noise)
    return rounded[0].astype(x.dtype)


REFERENCE = ElementwiseKernels(np)
"""The kernels that round messages at random."""

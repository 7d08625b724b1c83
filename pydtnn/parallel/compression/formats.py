"""Floating-point formats of e exponent and m mantissa bits, after IEEE 754.

A code is a sign, `e` bits of exponent with bias ``2**(e - 1) - 1`` and `m` bits of mantissa.
Exponent 0 encodes subnormal numbers, the highest exponent infinity and NaN: (5, 10) is float16,
(8, 7) is bfloat16. Values are rounded to nearest, ties to even.

Rounding is done by an addition: for ``2**E <= |x| < 2**(E + 1)`` the result is a multiple of
``2**(E - m)``. With M mantissa bits in the machine's type, these are exactly the numbers of
that type between ``c = 2**(E - m + M)`` and ``2 c``: the low bits of ``|x| + c`` are the rounded
mantissa, and for subnormal results `E` is bounded below. No intermediate result is a subnormal
number of the machine's type, with which processors may be slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pydtnn.parallel.compression.bits import code_type
from pydtnn.utils.validate import whole

CHUNK = 2**15
"""Elements that are encoded at a time; small enough for intermediate results to stay in cache."""


class _Machine(NamedTuple):
    """Layout of a floating-point type of the machine."""

    integer: type[np.unsignedinteger]
    mantissa: int
    bias: int


_MACHINE: dict[np.dtype, _Machine] = {
    np.dtype("float32"): _Machine(np.uint32, 23, 127),
    np.dtype("float64"): _Machine(np.uint64, 52, 1023),
}


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Parameters
    ----------
    exponent : int
        Bits of the exponent, 2 to 8.
    mantissa : int
        Bits of the mantissa, 1 to 22.
    """

    exponent: int
    mantissa: int

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("exponent", self.exponent, 2, 8),
            ("mantissa", self.mantissa, 1, 22),
        ):
            if whole("float", name, value, at_least=low) > high:
                raise ValueError(f"float: {name} must be at most {high} bits, got {value}")

    @property
    def width(self) -> int:
        """Number of bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """Number that is subtracted from the code of an exponent."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        """Code of infinity; those of finite numbers are below, those of NaN above."""
        return (2**self.exponent - 1) << self.mantissa

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.mantissa) * 2.0**self.bias

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
        for start in range(0, x.size, CHUNK):
            codes[start : start + CHUNK] = self._encode(x[start : start + CHUNK])
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
            values[magnitude == self.infinity] = np.inf
            values[magnitude > self.infinity] = np.nan
        signs = wide >> integer(self.width - 1)
        values.view(integer)[...] |= signs << integer(8 * dtype.itemsize - 1)
        return values

    @cached_property
    def _tables(self) -> dict[np.dtype, np.ndarray]:
        """Values of all codes, for codes of at most 16 bits."""
        codes = np.arange(2**self.width, dtype="uint32")
        return {dtype: self._decode(codes, dtype) for dtype in _MACHINE}

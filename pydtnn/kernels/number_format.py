"""Floating-point formats of a few bits, whose numbers are a subset of those of float32."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pydtnn.utils.validate import check_int


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format of e exponent and m mantissa bits.

    A code is a sign, `exponent` bits of exponent with bias ``2**(e - 1) - 1`` and `mantissa` bits
    of mantissa; exponent 0 encodes subnormal numbers. After IEEE 754 the highest exponent encodes
    infinity and NaN. A `finite` format uses it for numbers: with 8 bits and more all but that of
    the highest mantissa, which is NaN; with fewer bits all. These are the formats of `ml_dtypes`:
    e4m3 is its float8_e4m3, e4m3fn its float8_e4m3fn, and e2m1 its float4_e2m1fn.

    Parameters
    ----------
    exponent : int
        Bits of the exponent, 2 to 8.
    mantissa : int
        Bits of the mantissa, 1 to 22.
    finite : bool
        Whether there is no infinity; not with 8 bits of exponent.

    References
    ----------
    Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023,
    section 5.3.
    """

    exponent: int
    mantissa: int
    finite: bool = False

    def __post_init__(self) -> None:
        check_int("NumberFormat", "exponent", self.exponent, at_least=2, at_most=8)
        check_int("NumberFormat", "mantissa", self.mantissa, at_least=1, at_most=22)
        if self.finite and self.exponent == 8:
            raise ValueError("NumberFormat: with 8 bits of exponent, finite must be false")

    @classmethod
    def parse(cls, name: str) -> NumberFormat:
        """Return the format of a name such as "e5m2" or "e4m3fn".

        Names with fewer than 8 bits are finite formats with and without "fn".

        Raises
        ------
        ValueError
        """
        found = re.fullmatch(r"e(\d)m(\d{1,2})(fn)?", name)
        if not found:
            raise ValueError(
                f"expected a format such as e5m2, e4m3fn or e2m1, of 2 to 8 bits of exponent and "
                f"1 to 22 of mantissa, got {name!r}"
            )
        e, m = int(found[1]), int(found[2])
        return cls(e, m, finite=bool(found[3]) or 1 + e + m < 8)

    @property
    def width(self) -> int:
        """Number of bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """Number that is subtracted from the code of an exponent."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def highest(self) -> int:
        """Exponent of the largest number."""
        return self.bias + self.finite

    @property
    def largest(self) -> float:
        """The largest finite number."""
        missing = 2 if self.finite and self.width >= 8 else 1
        return (2 - missing * 2.0**-self.mantissa) * 2.0**self.highest

    @cached_property
    def layout(self) -> tuple[int, int, int, int]:
        """What kernels need: `mantissa`, `lowest`, `highest`, the mantissa of `largest`.

        The last is in the bits of a float32.
        """
        significand = int(self.largest / 2.0**self.highest * 2**23)
        return self.mantissa, self.lowest, self.highest, significand - 2**23


ARRAY, CHANNEL = "array", "channel"
"""Scales besides those of blocks."""

STOCHASTIC = "stochastic"

CHUNK = 4096
"""Elements of the parts of an array whose peaks are found first, to occupy several threads."""

LEAST = 2.0**-117
"""Smallest scale of an array: e4m3fn's smallest number times it has a finite reciprocal."""


@dataclass(frozen=True)
class Rounding:
    """How float32 arrays are rounded: format, scale, and to nearest even or at random.

    Values are computed with in float32 afterwards. A scale is the power of two that gives the
    largest element of its values the highest exponent of the format; at random the next one, if
    that element were out of range, so that the expected value is the input. With a format of
    `scales`, that of a block is a number of this format times a float32 scale of the array: with
    the largest numbers F of `form` and S of `scales`, ``t = max |x| / (F S)`` for the array and
    ``s = round(max |block| / F / t)`` for the block, and elements are rounded to multiples of
    ``s t``; all are 0 where s is 0. Values out of range become the largest number; infinite values
    and NaN remain, whatever the format, and count as the largest number of float32.

    Parameters
    ----------
    form : NumberFormat
    scale : str, int or None
        What has a scale: the "array", each "channel", or each block of this number of neighbours
        along the last axis. With 8 bits of exponent, none is needed.
    stochastic : bool
        Whether values are rounded up or down at random, without bias.
    rows : int
        Blocks have this number of rows, too: of outputs for weights, whose other axes count as one.
    scales : NumberFormat, optional
        Format of the scales of blocks; by default powers of two.

    Raises
    ------
    ValueError

    References
    ----------
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv 2509.25149.
    """

    form: NumberFormat
    scale: str | int | None = ARRAY
    stochastic: bool = False
    rows: int = 1
    scales: NumberFormat | None = None

    def __post_init__(self) -> None:
        if self.form.exponent == 8 and self.scale is not None:
            raise ValueError("formats with 8 bits of exponent have the range of float32: no scale")
        if self.scales is not None and (not isinstance(self.scale, int) or self.scales.width > 8):
            raise ValueError("scales have formats of up to 8 bits, for blocks, such as 16:e4m3fn")

    @classmethod
    def parse(cls, text: str) -> Rounding:
        """Return what a text such as "e4m3fn", "e5m2:channel" or "e2m1:32:stochastic" describes.

        Blocks of rows and columns, and the format of scales: "e2m1:16x16:e4m3fn". By default the
        array has a scale, unless the format has the exponents of float32.

        Raises
        ------
        ValueError
        """
        name, *rest = text.strip().split(":")
        form = NumberFormat.parse(name)
        scale: str | int | None = ARRAY if form.exponent < 8 else None
        rows, scales = 1, None
        for word in (word for word in rest if word != STOCHASTIC):
            sizes = [int(n) for n in word.split("x") if n.isdecimal() and 2 <= int(n) <= 2**20]
            if 0 < len(sizes) == word.count("x") + 1 < 3:
                rows, scale = sizes if len(sizes) == 2 else (1, sizes[0])
            elif word in (ARRAY, CHANNEL, "none"):
                scale = None if word == "none" else word
            elif word.startswith("e"):
                scales = NumberFormat.parse(word)
            else:
                raise ValueError(
                    f"expected after {name} a scale ({ARRAY}, {CHANNEL}, none, a block of 2 to "
                    f"{2**20} values or of rows and columns such as 16x16), the format of the "
                    f"scales of blocks such as e4m3fn, or {STOCHASTIC}, got {word!r}"
                )
        return cls(form, scale, STOCHASTIC in rest, rows, scales)

    def down(self) -> Rounding:
        """Return the same with blocks of as many rows of one column, instead of one row."""
        if self.rows > 1 or not isinstance(self.scale, int):
            return self
        return replace(self, rows=self.scale, scale=1)

    def apply(
        self, backend: Any, x: Any, *, out: Any, axis: int = -1, noise: Any | None = None
    ) -> None:
        """Round an array.

        Parameters
        ----------
        backend : Backend
        x : Array of float32
        out : Array
            Shaped like `x`, which it may be.
        axis : int
            That of channels, 0 or -1.
        noise : Noise, optional
            If `stochastic`.
        """
        if not x.size:
            return
        whole = axis == 0 and (self.scale == CHANNEL or self.rows > 1)
        shape = (len(x), -1) if whole else (-1, x.shape[-1])
        x, out = x.reshape(shape), out.reshape(shape)
        rows, block, largest = self.rows, x.shape[1], None
        if self.scale == ARRAY:
            flat = self._largest(backend, x.reshape(1, -1), 1, CHUNK)
            largest = flat.max(axis=1, keepdims=True)
        elif self.scale == CHANNEL and axis == -1:
            block = 1
            largest = self._largest(backend, x, rows, block).max(axis=0, keepdims=True)
        elif self.scale is not None:
            block = block if self.scale == CHANNEL else int(self.scale)
            largest = self._largest(backend, x, rows, block)
        peaks = self._peaks(backend, largest, noise is not None)
        backend.elementwise.round(x, self.form, peaks, rows, block, out=out, noise=noise)

    def _largest(self, backend: Any, x: Any, rows: int, block: int) -> Any:
        largest = backend.empty((-(-len(x) // rows), -(-x.shape[1] // block)), "int32")
        backend.elementwise.largest(x, rows, block, out=largest)
        return largest

    def _peaks(self, backend: Any, largest: Any | None, random: bool) -> Any:
        """Return the exponents or scales of blocks from the bits of their largest elements."""
        xp, form = backend.xp, self.form
        if largest is None:
            return xp.full((1, 1), form.highest, "int32")
        if self.scales is None:  # at random an element above the largest number has the next one
            spare = 0x7FFFFF - form.layout[3] if random else 0
            return xp.minimum((largest + spare >> 23) - 127, 127)
        scales = largest.view("float32") / xp.float32(form.largest)
        array = xp.maximum(scales.max() / xp.float32(self.scales.largest), xp.float32(LEAST))
        scales /= array
        plain = xp.full((1, 1), self.scales.highest, "int32")
        backend.elementwise.round(scales, self.scales, plain, 1, scales.shape[1], out=scales)
        return scales * array

"""Mean and standard deviation of pixels, per channel, and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pydtnn.data.pixels import look_up

Array = NDArray[Any]

CHUNK_BYTES, CHUNK_ROWS = 4 << 20, 1024
"""Maximum number of terms summed at once: fits in the cache, and 1024 * 255**2 < 2**32."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Mean and standard deviation per channel, float64 ``(C,)``, for pixels in [0, 1]."""

    mean: Array
    std: Array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        return np.array_equal([self.mean, self.std], [other.mean, other.std])


@dataclass(frozen=True)
class PixelSums:
    """Exact sums of uint8 pixels per channel; those of parts of a data set add up to its own.

    Attributes
    ----------
    count : int
        Pixels per channel.
    totals, squares : tuple of int
        Sum of the pixels and of their squares, for each channel.
    """

    count: int
    totals: tuple[int, ...]
    squares: tuple[int, ...]

    def __add__(self, other: PixelSums) -> PixelSums:
        return PixelSums(
            self.count + other.count,
            tuple(a + b for a, b in zip(self.totals, other.totals, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )

    def statistics(self) -> Statistics:
        """Return mean and standard deviation; that of a constant channel is 1, to divide by it."""
        count, channels = max(self.count, 1), len(self.totals)
        mean, std = np.zeros(channels), np.ones(channels)
        for c, (s, q) in enumerate(zip(self.totals, self.squares, strict=True)):
            mean[c] = s / (255 * count)
            variance = count * q - s * s  # times (255 count)**2; Python's integers do not cancel
            std[c] = math.sqrt(variance) / (255 * count) if variance else 1.0
        return Statistics(mean, std)


def pixel_sums(
    read: Callable[[Array], tuple[Array, Array]], input_shape: tuple[int, ...], samples: range
) -> PixelSums:
    """Sum the pixels of successive samples, in exact integers.

    Parameters
    ----------
    read : function of indices that returns ``(x, y)``, x uint8 ``(n, *input_shape)``
    input_shape : tuple of int
        Channels last.
    samples : range
        Indices of the samples.
    """
    features, channels = math.prod(input_shape), input_shape[-1]
    total = np.zeros(features, np.uint64)
    squares = np.zeros(features, np.uint64)
    rows = chunk_rows(input_shape)
    for start in range(0, len(samples), rows):
        x = read(np.array(samples[start : start + rows]))[0]
        if x.dtype != np.uint8:
            raise TypeError(
                f"pixel_sums: expected uint8 pixels, got {x.dtype}; set `pixels = "
                "False` on a data set of other numbers"
            )
        x = x.reshape(-1, features)
        total += x.sum(axis=0, dtype=np.uint32)
        squares += np.square(x, dtype=np.uint16).sum(axis=0, dtype=np.uint32)
    return PixelSums(
        len(samples) * features // channels,
        tuple(int(total[c::channels].sum()) for c in range(channels)),
        tuple(int(squares[c::channels].sum()) for c in range(channels)),
    )


def chunk_rows(input_shape: tuple[int, ...]) -> int:
    """Return the number of samples that are read and summed at once."""
    return min(max(CHUNK_BYTES // math.prod(input_shape), 1), CHUNK_ROWS)


class Normalize:
    """Convert samples to the model's dtype: ``(pixel - mean) / std``, or only a cast.

    Parameters
    ----------
    statistics : Statistics or None
    input_shape : tuple of int
        Shape of one sample, channels last.
    dtype : dtype of the result
    """

    def __init__(
        self, statistics: Statistics | None, input_shape: tuple[int, ...], dtype: DTypeLike
    ) -> None:
        self.statistics, self.dtype = statistics, np.dtype(dtype)
        # 16-bit results are computed in float32 and rounded once.
        self.arithmetic = np.dtype("float64" if self.dtype.itemsize == 8 else "float32")
        self.channels = input_shape[-1]
        # An image row: one long inner loop instead of one of C elements.
        self.width = math.prod(input_shape[-2:])

    @property
    def mean(self) -> Array:
        """Mean per channel, float64 ``(C,)``: the value normalised to zero, within rounding."""
        return self.statistics.mean if self.statistics else np.zeros(self.channels)

    def coefficients(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """Return (scale, shift) per channel, of type `arithmetic`, for samples of a type.

        The normalised sample is ``x scale + shift``, with a rounded product.
        """
        if self.statistics is None:
            return np.ones(self.channels, self.arithmetic), np.zeros(self.channels, self.arithmetic)
        unit = 255 if np.dtype(dtype) == np.uint8 else 1
        scale = 1 / (unit * self.statistics.std)
        shift = -self.statistics.mean / self.statistics.std
        return scale.astype(self.arithmetic), shift.astype(self.arithmetic)

    def __call__(self, x: Array) -> Array:
        """Return a new contiguous array of the shape of `x`; uint8 values are divided by 255."""
        if self.statistics is None:
            with np.errstate(over="ignore"):  # infinities of float16 are reported with the loss
                return np.array(x, dtype=self.dtype, order="C")
        scale, shift = self.coefficients(x.dtype)
        if x.dtype == np.uint8 and self.dtype == np.float32:
            table = np.arange(256, dtype=np.float32) * scale[:, None]
            table += shift[:, None]  # of (channels, 256)
            out = np.empty(x.shape, np.float32)
            look_up(np.ascontiguousarray(x), table, out)
            return out
        scale, shift = (np.tile(c, self.width // self.channels) for c in (scale, shift))
        out = np.empty(x.shape, self.arithmetic)
        rows = out.reshape(-1, self.width)  # (N * H, W * C)
        np.multiply(x.reshape(-1, self.width), scale, out=rows)
        rows += shift
        with np.errstate(over="ignore"):
            return out.astype(self.dtype, copy=False)

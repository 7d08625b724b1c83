"""Geometry of windows that slide over images: sizes, strides, padding, dilation.

A geometry is a value: two layers of equal shape have equal geometries, so a backend may use one as
the key of a cache. Every spatial quantity is a tuple with one entry per axis, for any number of
axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

Pairs = tuple[tuple[int, int], ...]
"""Padding: ``(before, after)`` for each spatial axis."""


def output_size(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: Pairs,
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """Number of positions of a window along each axis: ``(n + p - d (k - 1) - 1) // s + 1``."""
    return tuple(
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )


@dataclass(frozen=True)
class ConvGeometry:
    """Shapes of a convolution without its batch.

    Parameters
    ----------
    size : tuple of int
        Spatial size of the input, ``(H, W)`` for images.
    kernel, stride, dilation : tuple of int
        One entry per spatial axis.
    padding : tuple of (int, int)
        Zeros before and after each spatial axis.
    channels, filters : int
        Channels of the input and of the output.
    groups : int
        Filters of group ``g`` use the channels of group ``g`` only.

    Raises
    ------
    ValueError
        If a number other than the size and the padding is below 1, the padding is negative, or
        `groups` does not divide `channels` and `filters`.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]
    channels: int
    filters: int
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.channels, self.filters, self.groups) < 1:
            raise ValueError(
                "convolution: channels, filters and groups must be at least 1, got "
                f"{self.channels} channels, {self.filters} filters and {self.groups} groups"
            )
        if self.channels % self.groups or self.filters % self.groups:
            raise ValueError(
                "convolution: channels and filters must be divisible by groups, got "
                f"{self.channels} channels, {self.filters} filters and {self.groups} groups"
            )
        if min(*self.kernel, *self.stride, *self.dilation) < 1:
            raise ValueError(
                "convolution: kernel, stride and dilation must be at least 1, got "
                f"{self.kernel}, {self.stride} and {self.dilation}"
            )
        if any(zeros < 0 for pair in self.padding for zeros in pair):
            raise ValueError(
                f"convolution: padding must not be negative, got {self.padding}; cut the input"
            )
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    @classmethod
    @lru_cache(maxsize=1024)
    def shared(cls, *fields: Any) -> ConvGeometry:
        """Return the same object for equal fields, which caches find without comparisons."""
        return cls(*fields)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # of eight fields, in every kernel call

    def __str__(self) -> str:
        """Format the geometry: "3x3 16->32 on 8x8 stride 2x2 padding 1"."""
        words = [_by(self.kernel), f"{self.channels}->{self.filters}", f"on {_by(self.size)}"]
        if max(self.stride) > 1:
            words.append(f"stride {_by(self.stride)}")
        sides = {side for pair in self.padding for side in pair}
        if sides != {0}:
            words.append(f"padding {sides.pop() if len(sides) == 1 else self.padding}")
        if max(self.dilation) > 1:
            words.append(f"dilation {_by(self.dilation)}")
        if self.groups > 1:
            words.append(f"groups {self.groups}")
        return " ".join(words)

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Spatial size of the output."""
        return output_size(self.size, self.kernel, self.stride, self.padding, self.dilation)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the filters, ``(filters, *kernel, channels // groups)``."""
        return (self.filters, *self.kernel, self.channels // self.groups)

    def flops(self, batch: int) -> int:
        """Operations of one pass (forward, or backward of data or of filters), counting padding."""
        taps = prod(self.kernel) * self.channels // self.groups
        return 2 * batch * prod(self.output) * self.filters * taps


@dataclass(frozen=True)
class PoolGeometry:
    """Shapes of a pooling window without its batch; parameters as in `ConvGeometry`."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pairs
    channels: int

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Spatial size of the output."""
        return output_size(self.size, self.kernel, self.stride, self.padding, (1,) * len(self.size))


def _by(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))

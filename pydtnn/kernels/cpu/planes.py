"""What the convolutions of volumes have in common: planes, which the kernels of images convolve."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np

from pydtnn.kernels.cpu._conv import ConvKernels
from pydtnn.kernels.geometry import ConvGeometry

PLANES_BYTES = 4 << 20
"""Bytes of the planes that are convolved at a time, unless one plane is larger."""


class ImageKernels(Protocol):
    """The convolutions of images that are used here; `pydtnn.kernels.cpu.conv.Conv`."""

    xp: Any
    kernels: ConvKernels

    @property
    def threads(self) -> int:
        """Number of threads for a kernel call."""

    def forward(self, *arguments: Any, **options: Any) -> None:
        """Compute the output."""

    def backward_data(self, *arguments: Any, **options: Any) -> None:
        """Compute the gradient of the input."""

    def backward_filter(self, *arguments: Any, **options: Any) -> None:
        """Compute the gradient of the filters."""

    def backward(self, *arguments: Any, **options: Any) -> None:
        """Compute both."""


def is_depthwise(geometry: ConvGeometry) -> bool:
    """Return whether each channel of a volume has filters of its own."""
    return geometry.groups == geometry.channels > 1


@lru_cache(maxsize=1024)
def planes_of(geometry: ConvGeometry) -> ConvGeometry:
    """Return the convolution of images that computes a plane of the output, or its part by one tap.

    >>> str(planes_of(ConvGeometry((8, 9, 9), (2, 3, 3), (1,) * 3, ((0, 0),) * 3, (1,) * 3, 4, 5)))
    '3x3 8->5 on 9x9'
    """
    return ConvGeometry.shared(
        geometry.size[1:],
        geometry.kernel[1:],
        geometry.stride[1:],
        geometry.padding[1:],
        geometry.dilation[1:],
        (1 if is_depthwise(geometry) else geometry.kernel[0]) * geometry.channels,
        geometry.filters,
        geometry.groups,
    )


def at_once(plane: tuple[int, ...], dtype: Any) -> int:
    """Return how many planes are convolved at a time.

    It is a power of two: depths usually are, so that all calls have the same number of planes.
    """
    fitting = max(PLANES_BYTES // (prod(plane) * np.dtype(dtype).itemsize), 1)
    return 1 << (fitting.bit_length() - 1)

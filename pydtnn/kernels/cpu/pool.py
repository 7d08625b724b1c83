"""Compiled pooling of signals, images and volumes."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._pool import PoolKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, require, supported
from pydtnn.kernels.geometry import PoolGeometry
from pydtnn.kernels.reference import pool as reference
from pydtnn.kernels.reference.family import Array

INDICES = (np.dtype(np.uint8), np.dtype(np.int32))
"""Types of `index`; uint8 for windows of up to 256 taps."""


class CpuPool(Compiled, reference.PoolKernels):
    """Maximum and mean over windows of one to three axes; other data run on the reference."""

    table = PoolKernels

    def max_forward(self, x: Array, geometry: PoolGeometry, *, out: Array, index: Array) -> None:
        """Compute the maximum of each window; `index` receives the index of its tap."""
        require(_native(out, x) and index.dtype in INDICES and index.flags.carray)
        reference.check_index(index, geometry)
        self.kernels.max_forward(contiguous(x), geometry, out, index, self.threads)

    def max_backward(self, dy: Array, index: Array, geometry: PoolGeometry, *, out: Array) -> None:
        """Add each gradient to the input that was the maximum."""
        require(_native(out, dy) and index.dtype in INDICES)
        reference.check_index(index, geometry)
        self.kernels.max_backward(contiguous(dy), contiguous(index), geometry, out, self.threads)

    def average_forward(
        self, x: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Compute the mean of each window, padding counted as zeros or not counted at all."""
        require(_native(out, x))
        self.kernels.average_forward(contiguous(x), geometry, out, count_padding, self.threads)

    def average_backward(
        self, dy: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Distribute each gradient equally over the inputs of its window."""
        require(_native(out, dy))
        self.kernels.average_backward(contiguous(dy), geometry, out, count_padding, self.threads)

    def adaptive_forward(self, x: Array, *, out: Array) -> None:
        """Compute the means of bins of nearly equal size; one bin is the global average."""
        require(_native(out, x))
        self.kernels.average_forward(contiguous(x), None, out, False, self.threads)

    def adaptive_backward(self, dy: Array, *, out: Array) -> None:
        """Distribute each gradient equally over the inputs of its bin; overlapping bins add."""
        require(_native(out, dy))
        self.kernels.average_backward(contiguous(dy), None, out, False, self.threads)


def _native(out: Array, array: Array) -> bool:
    """Return whether the kernels support these: up to three axes, and one real type."""
    return out.ndim in (3, 4, 5) and supported(out, array)

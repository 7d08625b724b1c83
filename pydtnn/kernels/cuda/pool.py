"""Pooling of images on a GPU, by kernels of our own: see src/pool.cu."""

from __future__ import annotations

from math import prod

from pydtnn.kernels.cuda.layout import MANY_BLOCKS, MAX_BLOCKS, THREADS, ceil
from pydtnn.kernels.cuda.module import CudaKernels, native, vectors
from pydtnn.kernels.geometry import PoolGeometry
from pydtnn.kernels.reference import pool as reference
from pydtnn.kernels.reference.family import Array

INDICES = ("uint8", "int32")
"""Types of `index`; uint8 holds the taps of windows of up to 256."""

MAX_IMAGES = 8
"""That a thread takes, where there are blocks enough: what it divides, it divides once."""

MIN_BUSY_THREADS = 1 << 16
"""Threads from which on each may take several channels; a GPU needs about as many to be busy."""

BITS_32 = 1 << 31


class CudaPool(CudaKernels, reference.PoolKernels):
    """Maximum and mean over windows of images on a GPU; other data runs on the reference."""

    source = "pool"

    def max_forward(self, x: Array, geometry: PoolGeometry, *, out: Array, index: Array) -> None:
        """Take the maximum of each window; `index` receives which tap it was."""
        if not _native(out, x) or index.dtype.name not in INDICES or not index.flags.c_contiguous:
            return super().max_forward(x, geometry, out=out, index=index)
        x = self.xp.ascontiguousarray(x)
        kind = f"max_forward_{index.dtype.name}"
        self._launch(kind, (x, out, index), x, out, out, *_window(geometry))

    def max_backward(self, dy: Array, index: Array, geometry: PoolGeometry, *, out: Array) -> None:
        """Send each gradient to the input that was the maximum; overlapping windows add."""
        if not _native(out, dy) or index.dtype.name not in INDICES:
            return super().max_backward(dy, index, geometry, out=out)
        dy, index = map(self.xp.ascontiguousarray, (dy, index))
        kind = f"max_backward_{index.dtype.name}"
        self._launch(kind, (dy, index, out), out, dy, out, *_window(geometry))

    def average_forward(
        self, x: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Take the mean of each window, padding counted as zeros or not counted at all."""
        if not _native(out, x):
            return super().average_forward(x, geometry, out=out, count_padding=count_padding)
        x = self.xp.ascontiguousarray(x)
        count = prod(geometry.kernel) if count_padding else 0
        self._launch("average_forward", (x, out), x, out, out, *_window(geometry), count)

    def average_backward(
        self, dy: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Share each gradient equally among the inputs of its window."""
        if not _native(out, dy):
            return super().average_backward(dy, geometry, out=out, count_padding=count_padding)
        dy = self.xp.ascontiguousarray(dy)
        count = prod(geometry.kernel) if count_padding else 0
        self._launch("average_backward", (dy, out), out, dy, out, *_window(geometry), count)

    def adaptive_forward(self, x: Array, *, out: Array) -> None:
        """Take the means of bins of nearly equal size; one bin is the global average."""
        if not (_native(out, x) and _countable(x, out)):
            return super().adaptive_forward(x, out=out)
        x = self.xp.ascontiguousarray(x)
        self._launch("adaptive_forward", (x, out), x, out, out)

    def adaptive_backward(self, dy: Array, *, out: Array) -> None:
        """Share each gradient equally among the inputs of its bin; overlapping bins add."""
        if not (_native(out, dy) and _countable(out, dy)):
            return super().adaptive_backward(dy, out=out)
        dy = self.xp.ascontiguousarray(dy)
        self._launch("adaptive_backward", (dy, out), out, dy, out)

    def _launch(
        self,
        kind: str,
        arrays: tuple[Array, ...],
        inputs: Array,
        outputs: Array,
        written: Array,
        *rest: int,
    ) -> None:
        """Launch a kernel with a thread for each position of `written`, or one for some channels.

        Parameters
        ----------
        kind : str
            Name of the kernel, without the width and the element type.
        arrays : tuple of Array
            Its first arguments.
        inputs, outputs : Array
            Arrays with the sizes of what is pooled, and of what pooling makes of it.
        written : Array
        *rest : int
            Its last arguments.
        """
        images, *_, channels = written.shape
        if not written.size:
            return
        width, lanes = vectors(channels, written, *arrays)
        if written.size // lanes < MIN_BUSY_THREADS:
            width, lanes = "single", 1
        across = ceil(written.size // images // lanes, THREADS)
        turns = min(max(across * images // MANY_BLOCKS, 1), MAX_IMAGES)
        kernel, grid = f"{kind}_{width}", (across, min(ceil(images, turns), MAX_BLOCKS))
        sizes = (images, channels, *inputs.shape[1:3], *outputs.shape[1:3])
        self.launch(kernel, written.dtype.name, grid, (THREADS,), *arrays, *sizes, *rest)


def _window(geometry: PoolGeometry) -> tuple[int, ...]:
    """Arguments WINDOWS of the kernels."""
    before = (pair[0] for pair in geometry.padding)
    return (*geometry.kernel, *geometry.stride, *before)


def _native(out: Array, array: Array) -> bool:
    """Whether the kernels take these: images of one type, each with fewer than 2^31 elements."""
    largest = max(prod(out.shape[1:]), prod(array.shape[1:]))
    return out.ndim == 4 and native(out, array) and largest < BITS_32


def _countable(inputs: Array, outputs: Array) -> bool:
    """Whether the kernels can identify the bins of these sizes in 32 bits."""
    sizes = zip(inputs.shape[1:3], outputs.shape[1:3], strict=True)
    return all((size + 1) * (count + 1) < BITS_32 for size, count in sizes)

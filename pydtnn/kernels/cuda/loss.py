"""Losses on a GPU, whose sums stay there."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.layout import MAX_PARTS, MAX_TEAMS, THREADS, ceil, team
from pydtnn.kernels.cuda.module import CudaKernels, native, number, vectors
from pydtnn.kernels.reference import loss as reference
from pydtnn.kernels.reference.family import Array, Number


class CudaLoss(CudaKernels, reference.LossKernels):
    """Losses and their gradients; shapes as in the reference.

    Each returns an array () of float64 on the device, for which the host does not wait
    until ``float(loss)``.
    `scale` may be in device memory. A target that is no class makes the loss NaN, where the
    reference raises IndexError.
    """

    source = "loss"

    def cross_entropy(
        self,
        logits: Array,
        target: Array,
        smoothing: float,
        scale: Number,
        *,
        out: Array,
    ) -> Any:
        """Softmax cross-entropy of logits (N, K) with classes (N,)."""
        if not native(out, logits):
            return super().cross_entropy(logits, target, smoothing, scale, out=out)
        return self._classes("cross_entropy", logits, target, (float(smoothing),), scale, out)

    def hinge(self, y: Array, target: Array, scale: Number, *, out: Array) -> Any:
        """Multi-class hinge loss of scores (N, K) with classes (N,)."""
        if not native(out, y):
            return super().hinge(y, target, scale, out=out)
        return self._classes("hinge", y, target, (), scale, out)

    def binary_cross_entropy(
        self, logits: Array, target: Array, scale: Number, *, out: Array
    ) -> Any:
        """Cross-entropy of sigmoid(logits) with targets in [0, 1], mean over a sample's outputs."""
        if not _alike(out, logits, target):
            return super().binary_cross_entropy(logits, target, scale, out=out)
        return self._dense("binary_cross_entropy", logits, target, scale, out)

    def squared_error(self, y: Array, target: Array, scale: Number, *, out: Array) -> Any:
        """Squared error ``(y - t)^2``, mean over a sample's outputs."""
        if not _alike(out, y, target):
            return super().squared_error(y, target, scale, out=out)
        return self._dense("squared_error", y, target, scale, out)

    def absolute_error(self, y: Array, target: Array, scale: Number, *, out: Array) -> Any:
        """Absolute error ``|y - t|``, mean over a sample's outputs."""
        if not _alike(out, y, target):
            return super().absolute_error(y, target, scale, out=out)
        return self._dense("absolute_error", y, target, scale, out)

    def _classes(
        self,
        name: str,
        y: Array,
        target: Array,
        options: tuple[float, ...],
        scale: Number,
        out: Array,
    ) -> Array:
        rows, classes = y.shape
        y, target = self.xp.ascontiguousarray(y), self.xp.ascontiguousarray(target, "int64")
        width, each = vectors(classes, out, y)
        # there are no blocks that share a row for hinge: its rows are short
        who, per_block = team(1 if name == "hinge" else classes // each)
        blocks = min(ceil(rows, per_block), MAX_TEAMS)
        given = (y, target, *options, *number(scale), out)
        return self._sum(f"{name}_{who}_{width}", blocks, out, given, (rows, classes))

    def _dense(self, name: str, y: Array, target: Array, scale: Number, out: Array) -> Array:
        outputs = float(max(y.size // max(len(y), 1), 1))
        arrays = (self.xp.ascontiguousarray(y), self.xp.ascontiguousarray(target))
        given = (*arrays, outputs, *number(scale), out)
        width, each = vectors(0, out, *arrays)  # what is left over is taken one by one
        blocks = min(ceil(y.size, THREADS * each), MAX_PARTS)
        return self._sum(f"{name}_{width}", blocks, out, given, (y.size,))

    def _sum(
        self, kernel: str, blocks: int, out: Array, given: tuple[Any, ...], size: tuple[int, ...]
    ) -> Array:
        """Start a kernel that adds its losses up; its blocks are columns of threads."""
        blocks = max(blocks, 1)
        loss, partial = self.xp.empty((), "float64"), self.xp.empty(blocks, "float64")
        self.launch(
            kernel,
            out.dtype.name,
            (blocks,),
            (1, THREADS),
            *(*given, loss, *size, partial, self.device.arrived),
        )
        return loss


def _alike(out: Array, y: Array, target: Array) -> bool:
    return native(out, y, target) and out.shape == y.shape == target.shape

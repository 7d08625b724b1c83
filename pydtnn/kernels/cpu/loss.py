"""Compiled losses."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._loss import KINDS, LossKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native, require
from pydtnn.kernels.reference import loss as reference
from pydtnn.kernels.reference.family import Array


class CpuLoss(Compiled, reference.LossKernels):
    """Losses and their gradients on the CPU; shapes as in the reference."""

    table = LossKernels

    def cross_entropy(
        self, logits: Array, target: Array, smoothing: float, scale: float, *, out: Array
    ) -> float:
        """Softmax cross-entropy of logits (N, K) with classes (N,)."""
        require(native(out, logits))
        return self.kernels.cross_entropy(
            contiguous(logits), _classes(target), smoothing, scale, out, self.threads
        )

    def weighted_cross_entropy(
        self,
        logits: Array,
        target: Array,
        weights: Array | None,
        ignored: int | None,
        smoothing: float,
        scale: float,
        *,
        out: Array,
    ) -> float:
        """Cross-entropy with weights (K,) of the classes, without rows of an ignored class."""
        require(target.ndim == 1 and native(out, logits, weights))
        weights = None if weights is None else contiguous(weights)
        arrays = contiguous(logits), _classes(target), weights
        return self.kernels.weighted_cross_entropy(
            *arrays, ignored, smoothing, scale, out, self.threads
        )

    def hinge(self, y: Array, target: Array, scale: float, *, out: Array) -> float:
        """Multi-class hinge loss of scores (N, K) with classes (N,)."""
        require(native(out, y))
        return self.kernels.hinge(contiguous(y), _classes(target), scale, out, self.threads)

    def binary_cross_entropy(
        self, logits: Array, target: Array, scale: float, *, out: Array
    ) -> float:
        """Cross-entropy of sigmoid(logits) with targets in [0, 1], mean over a sample's outputs."""
        return self._mean("binary_cross_entropy", logits, target, scale, out)

    def squared_error(self, y: Array, target: Array, scale: float, *, out: Array) -> float:
        """Squared error ``(y - t)^2``, mean over a sample's outputs."""
        return self._mean("squared_error", y, target, scale, out)

    def absolute_error(self, y: Array, target: Array, scale: float, *, out: Array) -> float:
        """Absolute error ``|y - t|``, mean over a sample's outputs."""
        return self._mean("absolute_error", y, target, scale, out)

    def _mean(self, kind: str, y: Array, target: Array, scale: float, out: Array) -> float:
        require(native(out, y, target) and out.shape == y.shape == target.shape)
        outputs = max(y.size // max(len(y), 1), 1)
        total = self.kernels.elementwise(
            KINDS[kind], contiguous(y), contiguous(target), scale / outputs, out, self.threads
        )
        return total / outputs


def _classes(target: Array) -> Array:
    """Convert classes of any integer type to contiguous int64."""
    return np.require(target, np.int64, ["C", "A"]) if target.dtype.kind in "iu" else target

"""Reference losses: the sum over the samples, and its gradient times a scale.

A loss is summed, never averaged: `scale` (usually 1 / global batch) multiplies the gradient, so
that uneven shards add up exactly. Each returns a Python float, summed in float64. 16-bit arguments
are converted first. On a CPU, `out` may be the predictions.
"""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array, KernelFamily, Number, wide


def wrong_target(loss: str, row: int, target: int, classes: int) -> IndexError:
    """Return the error for a target that is not a class."""
    return IndexError(
        f"{loss}: targets must be in 0..{classes - 1}, got {target} in row {row}; check the labels"
    )


class LossKernels(KernelFamily):
    """Losses of predictions ``(N, ...)``; gradients go to `out`, shaped like the predictions."""

    def cross_entropy(
        self, logits: Array, target: Array, smoothing: float, scale: Number, *, out: Array
    ) -> float:
        """Softmax cross-entropy of logits (N, K) with classes (N,) int64.

        ``L = -sum_k q_k log softmax(x)_k`` with ``q = (1 - s) onehot + s / K``;
        ``dx = softmax(x) - q``. Label smoothing: Szegedy et al. 2016, section 7. A logit of
        -infinity excludes a class. A target that is not a class raises IndexError.
        """
        xp, classes = self.xp, logits.shape[1]
        rows = self._rows("cross_entropy", target, classes)
        logits = wide(logits)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
        dx = (xp.exp(log_p) - smoothing / classes) * scale
        dx[rows, target] -= (1 - smoothing) * scale
        out[...] = dx
        loss = (1 - smoothing) * log_p[rows, target].sum(dtype="float64")
        if smoothing > 0:  # otherwise log_p may be -infinity
            loss += smoothing / classes * log_p.sum(dtype="float64")
        return -float(loss)

    def weighted_cross_entropy(
        self,
        logits: Array,
        target: Array,
        weights: Array | None,
        ignored: int | None,
        smoothing: float,
        scale: Number,
        *,
        out: Array,
    ) -> Number:
        """Cross-entropy of logits (N, K) with weighted classes, or with probabilities.

        ``L = -sum_nk w_k q_nk log p_nk`` with ``p = softmax(x)`` and ``q = (1 - s) t + s / K``, so
        ``dx_nk = p_nk sum_j w_j q_nj - w_k q_nk``. The target t has shape (N, K), or is classes
        (N,) int64; rows whose class is `ignored` have neither loss nor gradient. `weights` (K,) are
        1 by default.
        """
        xp, logits, classes = self.xp, wide(logits), logits.shape[1]
        kept = target != ignored if ignored is not None and target.ndim == 1 else None
        if target.ndim == 1:
            target = xp.arange(classes) == target[:, None]
        q = (1 - smoothing) * target.astype(logits.dtype, copy=False) + smoothing / classes
        if weights is not None:
            q = q * weights
        if kept is not None:
            q, logits = q * kept[:, None], xp.where(kept[:, None], logits, 0)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
        out[...] = (xp.exp(log_p) * q.sum(axis=1, keepdims=True) - q) * scale
        log_p = xp.where(q > 0, log_p, 0)  # it may be -infinity elsewhere
        return -(q * log_p).sum(dtype="float64")

    def binary_cross_entropy(
        self, logits: Array, target: Array, scale: Number, *, out: Array
    ) -> float:
        """Cross-entropy of sigmoid(logits) with targets in [0, 1], mean over a sample's outputs.

        ``L = max(x, 0) - x t + log(1 + exp(-|x|))``, ``dx = sigmoid(x) - t``.
        """
        xp, logits, target = self.xp, wide(logits), wide(target)
        e = xp.exp(-abs(logits))
        sigmoid = xp.where(logits >= 0, 1 / (1 + e), e / (1 + e))
        return self._mean_over_outputs(
            xp.maximum(logits, 0) - logits * target + xp.log1p(e), sigmoid - target, scale, out
        )

    def squared_error(self, y: Array, target: Array, scale: Number, *, out: Array) -> float:
        """Squared error ``(y - t)^2``, mean over a sample's outputs."""
        d = wide(y) - wide(target)
        return self._mean_over_outputs(d * d, 2 * d, scale, out)

    def absolute_error(self, y: Array, target: Array, scale: Number, *, out: Array) -> float:
        """Absolute error ``|y - t|``, mean over a sample's outputs; the gradient at 0 is 0."""
        d = wide(y) - wide(target)
        return self._mean_over_outputs(abs(d), self.xp.sign(d), scale, out)

    def hinge(self, y: Array, target: Array, scale: Number, *, out: Array) -> float:
        """Multi-class hinge loss of scores (N, K) with classes (N,) int64.

        ``L = sum_{k != t} max(0, 1 + y_k - y_t)`` (Weston and Watkins 1999, equation 6). A target
        that is not a class raises IndexError.
        """
        xp, rows, y = self.xp, self._rows("hinge", target, y.shape[1]), wide(y)
        margin = 1 + y - y[rows, target][:, None]
        margin[rows, target] = 0
        dx = xp.where(margin > 0, scale, 0).astype(y.dtype)
        dx[rows, target] = -dx.sum(axis=1)
        out[...] = dx
        return float(xp.maximum(margin, 0).sum(dtype="float64"))

    def _rows(self, loss: str, target: Array, classes: int) -> Array:
        """Return the row indices after checking classes: negative ones would index from the end."""
        wrong = (target < 0) | (target >= classes)
        if wrong.any():
            row = int(wrong.argmax())
            raise wrong_target(loss, row, int(target[row]), classes)
        return self.xp.arange(len(target))

    def _mean_over_outputs(self, value: Array, slope: Array, scale: Number, out: Array) -> float:
        outputs = max(value[:1].size, 1)
        out[...] = slope * (scale / outputs)
        return float(value.sum(dtype="float64")) / outputs

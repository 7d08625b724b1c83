"""Cross-entropies with one weight per class or with probabilities, in array operations.

Those of classes without weights are kernels of the backend. Classes are converted to
probabilities of 0 and 1.
"""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.reference.family import Array, Number, wide


def soft_cross_entropy(
    xp: Any,
    logits: Array,
    target: Array,
    weights: Array | None,
    smoothing: float,
    scale: Number,
    out: Array,
    rows: Array | None = None,
) -> Number:
    """Compute the cross-entropy of logits (N, K) with classes or probabilities; see the loss.

    ``L = -sum_nk w_k q_nk log p_nk`` with ``p = softmax(x)``, so
    ``dx_nk = p_nk sum_j w_j q_nj - w_k q_nk``.

    Parameters
    ----------
    xp : module
    logits : Array, shape (N, K)
    target : Array, shape (N, K) or (N,) of int64
        The probability t of each class, or the class with t = 1.
    weights : Array, shape (K,), or None
        By default all are 1.
    smoothing : float
        ``q = (1 - s) t + s / K``.
    scale : Number
        Factor on the gradient.
    out : Array, shape (N, K)
        The gradient.
    rows : Array, shape (N,), optional
        Weight of each row; by default all are 1.

    Returns
    -------
    Number
        The loss, in float64.
    """
    logits = wide(logits)
    if target.ndim == 1:
        target = xp.arange(logits.shape[1]) == target[:, None]
    q = (1 - smoothing) * target.astype(logits.dtype, copy=False) + smoothing / logits.shape[1]
    if weights is not None:
        q = q * weights
    if rows is not None:
        q = q * rows[:, None]
    log_p = _log_softmax(xp, logits)
    out[...] = (xp.exp(log_p) * q.sum(axis=1, keepdims=True) - q) * scale
    log_p = xp.where(q > 0, log_p, 0)  # it may be -infinity elsewhere
    return -(q * log_p).sum(dtype="float64")


def _log_softmax(xp: Any, logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))

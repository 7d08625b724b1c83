"""Cross-entropy with one weight per class, in operations of the backend's array module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number, wide
from pydtnn.utils.validate import number, whole

Given = Sequence[float] | np.ndarray | Mapping[Any, float]


class ClassWeights:
    """Weights of the classes in a loss.

    Parameters
    ----------
    who : str
        First word of errors.
    given : sequence or mapping
        One weight of at least 0 for each class, or weights of some classes, by class; those of the
        others are 1. Keys may be text, as in JSON.

    Raises
    ------
    TypeError, ValueError
        If weights are not numbers of at least 0, or all are 0.
    """

    def __init__(self, who: str, given: Given) -> None:
        self.who = who
        pairs = given.items() if isinstance(given, Mapping) else enumerate(_list(who, given))
        self.weights: dict[int, float] = {}
        for key, value in pairs:
            index = int(key) if isinstance(key, str) and key.isdecimal() else key
            index = whole(who, "a class of class_weights", index, at_least=0)
            self.weights[index] = number(who, f"class_weights of class {key}", value, at_least=0)
        self.every = not isinstance(given, Mapping)
        if self.every and not any(self.weights.values()):
            raise ValueError(
                f"{who}: class_weights must have at least one number above 0, got "
                f"{[*self.weights.values()]}; omit them for equal weights"
            )
        self._placed: tuple[Backend, Array] | None = None

    def check(self, classes: int) -> None:
        """Raise ValueError if the weights are not those of this number of classes.

        Raises
        ------
        ValueError
        """
        if self.every and len(self.weights) != classes:
            raise ValueError(
                f"{self.who}: class_weights must be {classes} numbers, one for each output of the "
                f"model, got {len(self.weights)}; or name some classes: {{0: 2.0}}"
            )
        if max(self.weights, default=0) >= classes:
            raise ValueError(
                f"{self.who}: class_weights must have classes in 0..{classes - 1}, got "
                f"{max(self.weights)}"
            )

    def place(self, backend: Backend, classes: int, dtype: Any) -> Array:
        """Return the weights (K,) as an array of a backend, which is allocated once."""
        known = self._placed
        if known is not None and known[0] is backend and known[1].dtype == dtype:
            return known[1]
        values = np.ones(classes)
        values[[*self.weights]] = [*self.weights.values()]
        array = backend.asarray(values, dtype)
        self._placed = backend, array
        return array


def weighted_cross_entropy(
    xp: Any,
    logits: Array,
    target: Array,
    weights: Array,
    smoothing: float,
    scale: Number,
    out: Array,
) -> Number:
    """Compute the weighted cross-entropy of logits (N, K) with classes (N,); see the loss.

    ``L = -sum_nk w_k q_nk log p_nk`` with ``p = softmax(x)``, so
    ``dx_nk = p_nk sum_j w_j q_nj - w_k q_nk``.

    Parameters
    ----------
    xp : module
    logits : Array, shape (N, K)
    target : Array, shape (N,), int64
    weights : Array, shape (K,)
    smoothing : float
        ``q = (1 - s) onehot + s / K``.
    scale : Number
        Factor on the gradient.
    out : Array, shape (N, K)
        The gradient.

    Returns
    -------
    Number
        The loss, in float64.
    """
    logits, rows, share = wide(logits), xp.arange(len(target)), smoothing / logits.shape[1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    own = (1 - smoothing) * weights[target]  # (N,)
    total = own + share * weights.sum()  # (N,): sum_j w_j q_nj
    dx = (xp.exp(log_p) * total[:, None] - share * weights) * scale
    dx[rows, target] -= own * scale
    out[...] = dx
    loss = (own * log_p[rows, target]).sum(dtype="float64")
    if smoothing > 0:  # otherwise log_p may be -infinity
        loss = loss + share * (log_p * weights).sum(dtype="float64")
    return -loss


def _list(who: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple | np.ndarray) or np.ndim(given) != 1:
        raise TypeError(
            f"{who}: class_weights must be a list with one number per class, or a mapping of "
            f"classes to numbers, got {given!r}"
        )
    return [*given]

"""Checks and conversion of targets: classes, probabilities, or numbers like the predictions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.utils.validate import check_int

TOLERANCE = 1e-3
"""Largest error of a sum of probabilities, which may be float16."""


def is_classes(shape: tuple[int, ...], target: Array) -> bool:
    """Return whether `target` contains classes ``(N,)`` of predictions ``(N, K)``, K above 1."""
    return len(shape) == 2 and shape[1] > 1 and target.ndim == 1 and target.dtype.kind in "biu"


def checked_index(who: str, ignore_index: Any) -> int | None:
    """Return the class of targets that are left out, an integer or None.

    Raises
    ------
    TypeError
        If it is neither.
    """
    if ignore_index is None:
        return None
    return check_int(who, "ignore_index", ignore_index, at_least=-(2**63), at_most=2**63 - 1)


def check_classes(
    who: str, shape: tuple[int, ...], target: Array, *, others: str = "", ignored: int | None = None
) -> None:
    """Raise ValueError if a target is not one class for each row of predictions.

    Parameters
    ----------
    who : str
        Begins the sentence of an error.
    shape : tuple of int
        Shape of the predictions, ``(N, K)``, or ``(N, T, K)`` with classes at T positions.
    target : Array, shape (N,) or (N, T), integer or boolean
        Classes from 0 to K - 1.
    others : str
        Further targets that are allowed, for the sentence of an error.
    ignored : int, optional
        A class that is also allowed.

    Raises
    ------
    ValueError
        If the shape is another, numbers are not integers, or a class is out of range (the message
        contains the sample).
    """
    if len(shape) < 2 or (len(shape) > 2 and target.ndim < 2):
        raise ValueError(
            f"{who}: predictions must have shape (samples, classes), got {shape}; "
            "end the model with Flatten and Linear"
        )
    if tuple(target.shape) != tuple(shape[:-1]) or target.dtype.kind not in "biu":
        raise ValueError(
            f"{who}: the target must be integer classes of shape {tuple(shape[:-1])}{others}, "
            f"got {target.dtype} of shape {tuple(target.shape)}"
        )
    wrong = (target < 0) | (target >= shape[-1])
    if ignored is not None:
        wrong &= target != ignored
    if wrong.any():
        place = [int(i) for i in np.unravel_index(int(wrong.argmax()), target.shape)]
        position = f" at position {', '.join(map(str, place[1:]))}" if len(place) > 1 else ""
        value, advice = int(target[tuple(place)]), "use one output of the model per class"
        if value == shape[-1] and int(target.min()) > 0:
            advice = f"labels start at 0: subtract 1 from labels that start at 1, or {advice}"
        raise ValueError(
            f"{who}: classes must be in 0..{shape[-1] - 1}, got {value}"
            f"{position} for sample {place[0]} of the batch; {advice}"
        )


def check_distribution(
    who: str, shape: tuple[int, ...], target: Array, ignored: int | None = None
) -> None:
    """Raise ValueError if a target is neither one class nor one distribution per prediction.

    Parameters
    ----------
    who : str
        Begins the sentence of an error.
    shape : tuple of int
        Shape of the predictions, ``(N, K)`` or ``(N, T, K)``.
    target : Array
        Classes ``(N,)`` or ``(N, T)``, see `check_classes`, or numbers of the shape of the
        predictions: the probability of each class, or one-hot rows.
    ignored : int, optional
        A class that is also allowed.

    Raises
    ------
    ValueError
        If the shape is another, or the probabilities of a sample are below 0 or have another sum
        than 1.
    """
    if len(shape) < 2 or tuple(target.shape) != tuple(shape):
        if len(shape) > 1 and target.ndim == len(shape) and target.dtype.kind == "f":
            raise ValueError(
                f"{who}: probabilities must have the shape {tuple(shape)} of the predictions, got "
                f"{tuple(target.shape)}; use one output of the model per class"
            )
        others = f" or probabilities (one-hot rows) of shape {tuple(shape)}"
        check_classes(who, shape, target, others=others, ignored=ignored)
        return
    sums = target.sum(axis=-1)
    wrong = ~((target >= 0).all(axis=-1) & (abs(sums - 1) <= TOLERANCE))  # true for NaN too
    if wrong.any():
        row = int(wrong.argmax())
        sample = row // max(prod(shape[1:-1]), 1)
        raise ValueError(
            f"{who}: probabilities must be at least 0 with a sum of 1, got a sum of "
            f"{float(sums.reshape(-1)[row]):g} and a minimum of "
            f"{float(target.reshape(-1, shape[-1])[row].min()):g} for sample {sample} of the "
            "batch; binary_cross_entropy takes several labels of a sample"
        )


def rows_of(y: Array, target: Array) -> tuple[Array, Array, int]:
    """Return predictions ``(N, T, K)`` as rows ``(N T, K)``, their targets, and T.

    Sums over samples are those over rows divided by T: each sample has the mean of its positions.
    Predictions ``(N, K)`` are their own rows, and T is 1. Targets are int64 classes ``(N T,)``, or
    probabilities ``(N T, K)``.
    """
    positions, classes = prod(y.shape[1:-1]), y.shape[-1]
    if target.ndim == y.ndim and tuple(target.shape) == tuple(y.shape):
        target = target.reshape(-1, classes)
        target = target if target.dtype.kind == "f" else target.astype(y.dtype)
    else:
        target = target.reshape(-1).astype("int64", copy=False)
    return (y if y.ndim == 2 else y.reshape(-1, classes)), target, positions


def most_likely(target: Array) -> Array:
    """Return classes ``(N,)``: targets of classes, or the first of the largest probabilities."""
    return target.argmax(axis=1) if target.ndim == 2 else target


def check_dense(who: str, shape: tuple[int, ...], target: Array) -> None:
    """Raise ValueError if `dense` cannot convert a target to the shape of the predictions.

    Parameters
    ----------
    who : str
        Begins the sentence of an error.
    shape : tuple of int
        Shape ``(N, ...)`` of the predictions.
    target : Array
        Numbers of that shape; the last axis may be missing for predictions ``(N, ..., 1)``; or
        classes ``(N,)`` for ``(N, K)``.

    Raises
    ------
    ValueError
        If the shape is another, or a class is out of range.
    """
    if is_classes(shape, target):
        check_classes(who, shape, target)
        return
    fitting = [shape, shape[:-1]] if len(shape) > 1 and shape[-1] == 1 else [shape]
    if tuple(target.shape) not in fitting:
        raise ValueError(
            f"{who}: the target must have the shape {shape} of the predictions "
            f"or be integer classes of shape {shape[:1]}, "
            f"got {target.dtype} of shape {tuple(target.shape)}"
        )


def dense(xp: Any, y: Array, target: Array) -> Array:
    """Convert a target to the shape and dtype of the predictions; classes become one-hot rows.

    Parameters
    ----------
    xp : module
        Array module of the backend.
    y : Array, shape (N, ...)
    target : Array
        A target that `check_dense` accepts.

    Returns
    -------
    Array
        Targets of the shape and dtype of `y`.
    """
    if is_classes(y.shape, target):
        return one_hot(xp, target, y.shape[1], y.dtype)
    return target.astype(y.dtype, copy=False).reshape(y.shape)


def one_hot(xp: Any, target: Array, classes: int, dtype: Any) -> Array:
    """Convert classes ``(N,)`` to rows ``(N, K)`` with a 1 at the class and 0 elsewhere."""
    rows = xp.zeros((len(target), classes), dtype)
    rows[xp.arange(len(target)), target.astype("int64", copy=False)] = 1
    return rows

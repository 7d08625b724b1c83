"""A data set of arrays that are already in memory (or mapped into it)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pydtnn.data.dataset import Dataset

Array = NDArray[Any]


class ArrayDataset(Dataset):
    """Samples `x` and targets `y` of one's own.

    Parameters
    ----------
    x : array, shape ``(n, H, W, C)`` or ``(n, features)`` or any other ``(n, ...)``
        uint8 pixels are normalised with the statistics of the training set; floats are taken as
        they are.
    y : array
        Labels ``(n,)`` of integers from 0, or float targets ``(n, ...)``.
    classes : int, optional
        Number of classes; by default that of `like`, or one more than the largest label.
    like : Dataset, optional
        The training set, where this one is a test set: its statistics and number of classes hold
        here too.
    channels_first : bool, default False
        Whether `x` is ``(n, C, H, W)``; it is read as ``(n, H, W, C)``.
    name : str, default "array"

    Raises
    ------
    ValueError
        If lengths or shapes do not fit, or a label is not in ``0..classes-1``.
    TypeError
        If `x` holds neither uint8 nor floats, or `y` neither integers nor floats.

    Examples
    --------
    >>> train = ArrayDataset(np.zeros((4, 8, 8, 3), np.uint8), [0, 1, 2, 1])
    >>> len(train), train.input_shape, train.classes
    (4, (8, 8, 3), 3)
    """

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        classes: int | None = None,
        like: Dataset | None = None,
        channels_first: bool = False,
        name: str = "array",
    ) -> None:
        samples, targets = np.asarray(x), np.asarray(y)
        self.name, self.like = name, like
        self.x = self._samples(samples, channels_first)
        self.input_shape = self.x.shape[1:]
        self.pixels = self.x.dtype == np.uint8
        if like is not None and self.input_shape != like.input_shape:
            raise ValueError(
                f"{name}: samples of shape {self.input_shape} cannot be like those of {like.name}, "
                f"of shape {like.input_shape}."
            )
        if targets.ndim == 0 or len(targets) != len(self.x):
            raise ValueError(
                f"{name}: y must have one target for each of the {len(self.x)} samples; given "
                f"shape {targets.shape}."
            )
        self.classes, self.y = self._targets(targets, classes)

    def _samples(self, x: Array, channels_first: bool) -> Array:
        if x.dtype != np.uint8 and x.dtype.kind != "f":
            raise TypeError(
                f"{self.name}: x must hold uint8 pixels or floats; given {x.dtype}; convert it "
                "with x.astype('float32')."
            )
        if x.ndim < 2:
            raise ValueError(
                f"{self.name}: x must have an axis of samples and one of features; given shape "
                f"{x.shape}."
            )
        if channels_first and x.ndim < 3:
            raise ValueError(
                f"{self.name}: channels_first needs x of shape (n, C, ...); given shape {x.shape}."
            )
        return np.moveaxis(x, 1, -1) if channels_first else x

    def _targets(self, y: Array, classes: int | None) -> tuple[int | None, Array]:
        if y.dtype.kind == "f":
            if classes is not None:
                raise TypeError(
                    f"{self.name}: {classes} classes need integer labels; given {y.dtype} targets."
                )
            return None, y
        if y.dtype.kind not in "iu":
            raise TypeError(
                f"{self.name}: y must hold integer labels or float targets; given {y.dtype}."
            )
        if y.ndim != 1:
            raise ValueError(
                f"{self.name}: labels must have shape (n,); given {y.shape}; use y.argmax(-1) on "
                "one-hot rows."
            )
        low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
        if classes is None:
            classes = (self.like.classes if self.like is not None else None) or high + 1
        if low < 0 or high >= classes:
            raise ValueError(
                f"{self.name}: labels must lie in 0..{classes - 1}; found "
                f"{low if low < 0 else high}."
            )
        return classes, y.astype(np.int64)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: Array) -> tuple[Array, Array]:
        return np.ascontiguousarray(self.x[indices]), self.y[indices]

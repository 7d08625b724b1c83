"""A data set of arrays in memory (or mapped into it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pydtnn.data.batch import each, each_names, parts, plain_parts
from pydtnn.data.dataset import Dataset
from pydtnn.utils.validate import check_int

Array = NDArray[Any]


class ArrayDataset(Dataset):
    """Samples `x` and targets `y` in arrays.

    Parameters
    ----------
    x : array, shape ``(n, H, W, C)`` or ``(n, features)`` or any other ``(n, ...)``
        uint8 pixels are normalised with the statistics of the training set; floats are not changed.
        A tuple of arrays if a sample has several inputs.
    y : array
        Labels ``(n,)`` of integers from 0, or of several positions, such as masks ``(n, H, W)``, or
        float targets ``(n, ...)``. Booleans are integers 0 and 1. A tuple of arrays if a sample has
        several targets, one for each output of a model.
    classes : int, optional
        Number of classes; by default that of `like`, or one more than the largest label. A tuple
        for several targets.
    ignore_index : int, optional
        A label without a class, such as 255, see `pydtnn.losses.CategoricalCrossEntropy`.
    class_names : sequence of str, optional
        Name of each class, which `classes` then need not repeat; by default those of `like`. A
        tuple with one sequence, or None, for each of several targets.
    like : Dataset, optional
        The training set, if this one is a test set: its statistics, number and names of classes are
        used.
    channels_first : bool, default False
        Whether `x` is ``(n, C, H, W)``; it is read as ``(n, H, W, C)``.
    name : str, default "array"

    Raises
    ------
    ValueError
        If lengths or shapes do not fit, or a label is not in ``0..classes-1``.
    TypeError
        If `x` contains neither uint8 nor floats, or `y` neither integers nor floats.

    Examples
    --------
    >>> train = ArrayDataset(np.zeros((4, 8, 8, 3), np.uint8), [0, 1, 2, 1])
    >>> len(train), train.input_shape, train.classes
    (4, (8, 8, 3), 3)
    """

    def __init__(
        self,
        x: ArrayLike | tuple[ArrayLike, ...],
        y: ArrayLike | tuple[ArrayLike, ...],
        *,
        classes: int | tuple[int | None, ...] | None = None,
        ignore_index: int | None = None,
        class_names: Sequence[Any] | None = None,
        like: Dataset | None = None,
        channels_first: bool = False,
        name: str = "array",
    ) -> None:
        self.name, self.like = name, like
        self.ignore_index = ignore_index
        if ignore_index is not None:
            check_int(name, "ignore_index", ignore_index, at_least=-(2**63), at_most=2**63 - 1)
        self.x = each(lambda part: self._samples(part, channels_first), _arrays(name, "x", x))
        self.input_shape = each(lambda part: part.shape[1:], self.x)
        if len({len(part) for part in parts(self.x)}) > 1:
            raise ValueError(
                f"{name}: the inputs of a sample must be arrays of one length, got lengths "
                f"{[*map(len, self.x)]}; use a list, not a tuple, for the samples of one input"
            )
        self.pixels = any(part.dtype == np.uint8 for part in parts(self.x))
        if like is not None and self.input_shape != like.input_shape:
            raise ValueError(
                f"{name}: expected samples of shape {like.input_shape}, as in {like.name}, got "
                f"{self.input_shape}"
            )
        targets: Any = _arrays(name, "y", y)
        self.classes: Any
        self.y: Any
        usual = None if like is None else like.classes
        self.class_names = _class_names(name, class_names, isinstance(targets, tuple))
        if self.class_names is None and like is not None and classes in (None, like.classes):
            self.class_names = like.class_names
        elif classes is None and self.class_names is not None:
            classes = each_names(len, self.class_names)
        if isinstance(targets, tuple):
            rows = zip(
                targets, *(_for_each(name, n, targets) for n in (classes, usual)), strict=True
            )
            pairs = [self._targets(*row) for row in rows]
            self.classes, self.y = (tuple(column) for column in zip(*pairs, strict=True))
        else:
            self.classes, self.y = self._targets(targets, classes, usual)
        if self.class_names is not None and self.classes != each_names(len, self.class_names):
            raise ValueError(
                f"{name}: class_names must have one name for each class, got "
                f"{each_names(len, self.class_names)} names of {self.classes} classes"
            )

    def _samples(self, x: Array, channels_first: bool) -> Array:
        if x.dtype != np.uint8 and x.dtype.kind != "f":
            raise TypeError(
                f"{self.name}: x must contain uint8 pixels or floats, got {x.dtype}; convert it "
                "with x.astype('float32')"
            )
        if x.ndim < 2:
            raise ValueError(
                f"{self.name}: x must have at least two axes (n, ...), got shape {x.shape}"
            )
        if channels_first and x.ndim < 3:
            raise ValueError(
                f"{self.name}: channels_first requires x of shape (n, C, ...), got shape {x.shape}"
            )
        return np.moveaxis(x, 1, -1) if channels_first else x

    def _targets(self, y: Array, classes: Any, usual: int | None) -> tuple[int | None, Array]:
        if y.ndim == 0 or len(y) != len(self):
            raise ValueError(
                f"{self.name}: y must have one target for each of the {len(self)} samples, got "
                f"shape {y.shape}"
            )
        if y.dtype.kind == "f":
            if classes is not None:
                raise TypeError(
                    f"{self.name}: {classes} classes require integer labels, got {y.dtype} targets"
                )
            return None, y
        if y.dtype.kind not in "biu":
            raise TypeError(
                f"{self.name}: y must contain integer labels, booleans or float targets, got "
                f"{y.dtype}"
            )
        known = y if self.ignore_index is None else y[y != self.ignore_index]
        low, high = (int(known.min()), int(known.max())) if known.size else (0, 0)
        if classes is None:
            classes = usual or high + 1
        if low < 0 or high >= classes:
            raise ValueError(
                f"{self.name}: labels must be in 0..{classes - 1}, got {low if low < 0 else high}; "
                "subtract the smallest, set ignore_index to one that is no class, or convert "
                "numbers that are no classes to floats"
            )
        return classes, y.astype(np.int64)

    def __len__(self) -> int:
        return len(parts(self.x)[0])

    def read(self, indices: Array) -> tuple[Any, Any]:
        x = each(lambda part: np.ascontiguousarray(part[indices]), self.x)
        return x, each(lambda part: part[indices], self.y)


def _for_each(name: str, classes: Any, targets: tuple[Array, ...]) -> tuple[int | None, ...]:
    """Return a number of classes for each target."""
    if classes is None:
        return (None,) * len(targets)
    if not isinstance(classes, tuple) or len(classes) != len(targets):
        raise ValueError(
            f"{name}: classes must be a tuple with one number, or None, for each of the "
            f"{len(targets)} targets, got {classes!r}"
        )
    return classes


def _class_names(name: str, class_names: Any, several: bool) -> Any:
    """Return names of classes as a tuple, or a tuple of tuples for several targets."""
    if class_names is None:
        return None
    kinds = list(class_names) if several else [class_names]
    known = [kind for kind in kinds if kind is not None]
    if any(isinstance(kind, str) or not all(isinstance(n, str) for n in kind) for kind in known):
        raise TypeError(
            f"{name}: class_names must be a list of str, such as ['cat', 'dog'], got {class_names}"
        )
    names = tuple(None if kind is None else tuple(map(str, kind)) for kind in kinds)
    return names if several else names[0]


def _arrays(who: str, name: str, value: Any) -> Any:
    """Return several arrays as a tuple, anything else as one array."""
    arrays = plain_parts(who, name, value)
    return arrays[0] if isinstance(arrays, tuple) and len(arrays) == 1 else arrays

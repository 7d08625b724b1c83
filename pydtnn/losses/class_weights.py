"""Weights of the classes in a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
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


def _list(who: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple | np.ndarray) or np.ndim(given) != 1:
        raise TypeError(
            f"{who}: class_weights must be a list with one number per class, or a mapping of "
            f"classes to numbers, got {given!r}"
        )
    return [*given]

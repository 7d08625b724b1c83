"""Clipping of gradients by their global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number

Total = Callable[[Callable[[Array], Number]], Number]

TINY = 2.0**-600
"""Factor on gradients if the square of their norm overflows."""


class Clipping:
    """Scale all gradients by ``min(1, limit / norm)``.

    Parameters
    ----------
    limit : float
        Largest global norm.

    References
    ----------
    Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
    algorithm 1.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._square: Number | None = None  # of the norm in multiples of 1 / `_unit`
        self._unit = 1.0

    def apply(
        self,
        backend: Backend,
        total: Total,
        grads: Sequence[Array],
    ) -> None:
        """Scale gradients in place.

        Parameters
        ----------
        backend : Backend
        total : callable
            Adds a function's numbers of all gradients of all ranks.
        grads : sequence of Array
            The gradients that are scaled.
        """
        square, factors = _squared_norm(backend, total, 1.0), []
        self._square, self._unit = square, 1.0
        if isinstance(square, float) and square == math.inf:
            tiny = _squared_norm(backend, total, TINY)
            if isinstance(tiny, float) and tiny < math.inf:
                self._square, self._unit = tiny, TINY
                norm = math.sqrt(tiny)  # times TINY
                factors = [TINY, self.limit / norm] if TINY * self.limit < norm else []
        else:
            factor = backend.update.clip_factor(square, self.limit)
            factors = [] if isinstance(factor, float) and factor == 1 else [factor]
        for array in grads:
            for factor in factors:  # one by one: the product of two may underflow
                backend.update.scale(array, factor)

    @property
    def norm(self) -> float | None:
        """Norm of the last gradients before clipping; None before the first."""
        return None if self._square is None else float(self._square) ** 0.5 / self._unit


def _squared_norm(backend: Backend, total: Total, unit: float) -> Number:
    """Sum the squares of all gradients, each times `unit`, over the ranks."""

    def square(g: Array) -> Number:
        value: Number = backend.update.squared_norm(g if unit == 1 else g * unit)
        return value

    with np.errstate(over="ignore"):  # handled by `apply`
        return total(square)

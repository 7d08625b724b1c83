"""Clipping of gradients by their global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number

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
        own: Sequence[Array],
        grads: Sequence[Array],
        total: Callable[[Number], Number],
    ) -> None:
        """Scale gradients in place.

        Parameters
        ----------
        backend : Backend
        own : sequence of Array
            The gradients of which this rank computes the norm.
        grads : sequence of Array
            The gradients that are scaled.
        total : callable
            Adds the numbers of all ranks.
        """
        square, factors = _squared_norm(backend, own, 1.0, total), []
        self._square, self._unit = square, 1.0
        if isinstance(square, float) and square == math.inf:
            tiny = _squared_norm(backend, own, TINY, total)
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


def _squared_norm(
    backend: Backend, gradients: Sequence[Array], unit: float, total: Callable[[Number], Number]
) -> Number:
    """Sum the squares of all gradients, each times `unit`, over the ranks."""
    with np.errstate(over="ignore"):  # handled by `apply`
        squares = [backend.update.squared_norm(g if unit == 1 else g * unit) for g in gradients]
    return total(sum(squares))

"""AdamW in the eigenbases of the gradients' second moments."""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import BucketEntry
from pydtnn.optimizers.adaptive import AdamW
from pydtnn.optimizers.base import SlotForm
from pydtnn.utils.option import option

SIDES = {"left": 0, "right": 1, "left_basis": 0, "right_basis": 1}
"""Axis of the slots of a matrix that are not like the matrix."""


class SOAP(AdamW):
    """AdamW of the gradients of matrices, in the eigenbases of their second moments.

    With the gradient g of a matrix (O, I), or of a filter as (O, kh kw I): ``L = beta2 L + (1 -
    beta2) g g'``, ``R`` alike of ``g' g``, and P and Q their eigenvectors, those of the first
    gradient, with which nothing is updated. Every `frequency` updates they are the orthogonal
    factors of ``L P`` and ``R Q``, with columns, and elements of v, in the order of the
    eigenvalues. ``m = beta1 m + (1 - beta1) g``, v is the mean of the squares of ``P' g Q``, and
    ``w -= lr (P n Q' + decay w)`` with ``n = c P' m Q / (sqrt(v) + epsilon)`` and ``c = sqrt(1 -
    beta2^t) / (1 - beta1^t)``. AdamW updates what is no matrix. Eigenvectors of a moment without
    full rank are arbitrary: results of ranks that sum in another order differ from serial ones.

    Parameters
    ----------
    frequency : int
        Updates from one basis to the next.
    max_dimension : int
        Larger sides of a matrix have no basis.
    lr, beta1, beta2, epsilon, weight_decay, clip_norm, groups
        See `AdamW`.

    References
    ----------
    Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", ICLR 2025,
    algorithms 3 and 4.
    """

    default_lr = 0.003
    slots = ("m", "v", *SIDES)
    per_parameter = True
    beta1: float = option(0.95, at_least=0, below=1)
    beta2: float = option(0.95, at_least=0, below=1)
    frequency: int = option(10, at_least=1)
    max_dimension: int = option(10_000, at_least=1)

    def terms_of(self, entry: BucketEntry) -> dict[str, Any]:
        """Return the shape of a matrix; None for a parameter that AdamW updates."""
        rows = entry.shape[0] if entry.form == "matrix" else 0
        shape = rows, prod(entry.shape[1:])
        return {"matrix": shape if 0 < min(shape) <= self.max_dimension else None}

    def cost(self, entry: BucketEntry) -> int:
        """Return the operations: those of products of matrices, and a few of each element."""
        rows, columns = self.terms_of(entry)["matrix"] or (0, 0)
        sides = [side * (side <= self.max_dimension) for side in (rows, columns)]
        return 20 * prod(entry.shape) + 8 * rows * columns * sum(sides)

    def slot_form(self, slot: str, entry: BucketEntry) -> SlotForm:
        if slot not in SIDES:
            return entry.shape, None
        side = (self.terms_of(entry)["matrix"] or (0, 0))[SIDES[slot]]
        return (side * (side <= self.max_dimension),) * 2, None

    def uses(self, slot: str, entry: BucketEntry) -> bool:
        """Return whether a parameter has the slot, as sides of matrices have."""
        return slot not in SIDES or self.slot_form(slot, entry)[0] != (0, 0)

    def update(self, w: Array, g: Array, m: Array, v: Array, *sides: Any, **numbers: Any) -> None:
        lr, step, matrix = numbers["lr"], numbers["step"], numbers.pop("matrix")
        if matrix is None:
            super().update(w, g, m, v, **numbers)
            return
        xp, host = self.backend.xp, self.backend.to_numpy
        w, g, m, v = (array.reshape(matrix) for array in (w, g, m, v))
        left, right, p, q = (side.reshape((isqrt(len(side)),) * 2) for side in sides)
        begun = bool(p.any() or q.any())
        if begun:
            m *= self.beta1
            m += (1 - self.beta1) * g
            v *= self.beta2
            v += (1 - self.beta2) * turned(g, p, q) ** 2
            rate = lr * (1 - self.beta2 ** (step - 1)) ** 0.5 / (1 - self.beta1 ** (step - 1))
            n = turned(m, p, q) / (xp.sqrt(v) + self.epsilon)
            w *= 1 - lr * numbers["decay"]
            w -= rate * turned(n, p.T, q.T)
        for moment, basis, x, squares in ((left, p, g, v), (right, q, g.T, v.T)):
            if moment.size:
                moment *= self.beta2
                moment += (1 - self.beta2) * (x @ x.T)
                if not begun:
                    found = np.linalg.eigh(host(moment))[1][:, ::-1]
                elif (step - 1) % self.frequency == 0:
                    power = host(moment @ basis)
                    order = np.argsort(-(host(basis) * power).sum(axis=0))
                    found = np.linalg.qr(power[:, order])[0]
                    squares[...] = squares[self.backend.asarray(order)]
                else:
                    continue
                basis[...] = self.backend.asarray(found)


def turned(x: Array, p: Array, q: Array) -> Array:
    """Return ``p' x q``, without a factor that is empty."""
    x = p.T @ x if p.size else x
    return x @ q if q.size else x

"""Muon: matrices move along orthogonal matrices, everything else as with AdamW."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import BucketEntry
from pydtnn.optimizers.adaptive import AdamW
from pydtnn.utils.option import option

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of a step of the iteration: singular values below 1 grow to 0.7 to 1.2 within five steps."""


def together(small: int, large: int) -> int:
    """Return of how many steps p is multiplied before x is: each multiplies its error by up to 12.

    Parameters
    ----------
    small, large : int
        Sides of the matrix.
    """
    return 3 if large >= 2 * small else 1  # which takes fewer operations


class Muon(AdamW):
    """Momentum of matrices and filters, orthogonalised; AdamW for all other parameters.

    ``v = momentum v + g``; ``u = g + momentum v`` (or `v` without `nesterov`); ``w -= lr (0.2
    sqrt(max(O, I)) orthogonal(u) + decay w)``, where `orthogonal` replaces the singular values of a
    matrix ``(O, I)`` by numbers near 1. The factor gives a step the root mean square of one of
    AdamW, so that rates and decays of AdamW apply. A filter is the matrix ``(O, kh kw I)``, and
    matrices of experts are updated one by one.

    Muon updates matrices that multiply activations. Vectors, such as biases and the parameters of
    norms, and tables of vectors, such as embeddings and positions, are updated by AdamW, and so are
    those of a group with the rule "adamw": ``groups={"head": {"rule": "adamw"}}``.

    Parameters
    ----------
    lr : float or Schedule
    momentum : float
        In [0, 1).
    nesterov : bool
    steps : int
        Newton-Schulz steps of the orthogonalisation, ``x = p(x x') x`` with ``p(y) = a + b y + c
        y^2``. As p commutes with x x', the product of up to three of them is computed before x is
        multiplied, if x is at least twice as wide as high.
    bfloat16 : bool
        Compute them with 16-bit matrices, as the authors do on GPUs.
    adamw_lr_factor : float
        Factor on the rate of the parameters that AdamW updates.
    beta1, beta2, epsilon : float
        Of AdamW.
    weight_decay, clip_norm, groups
        See `Optimizer`.

    Notes
    -----
    Matrices have the slot "m" only: half of the state of AdamW.

    Raises
    ------
    ValueError
        When it is bound to a model, if a group with the rule "muon" names a parameter that is no
        matrix.

    References
    ----------
    Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. Liu et al.,
    "Muon is scalable for LLM training", arXiv 2502.16982, 2025, algorithm 1 and section 2.2.
    """

    per_parameter = True
    rules = ("muon", "adamw")
    decoupled = True
    momentum: float = option(0.95, at_least=0, below=1)
    nesterov: bool = option(True)
    steps: int = option(5, at_least=1)
    bfloat16: bool = option(False)
    adamw_lr_factor: float = option(1.0, at_least=0)
    weight_decay: float = option(0.1, at_least=0)

    def terms_of(self, entry: BucketEntry) -> dict[str, Any]:
        """Return the matrices of a parameter; None for one that AdamW updates."""
        rule, form, shape = self.groups.of(entry.name, 0.0).rule, entry.form, entry.shape
        if form in ("matrix", "stack") and rule != "adamw":
            count = shape[0] if form == "stack" else 1
            rows = shape[form == "stack"]
            # how many, their rows and columns
            return {"matrices": (count, rows, prod(shape) // max(count * rows, 1))}
        if rule == "muon":
            raise ValueError(
                f"Muon: groups must name matrices for the rule muon, got {entry.name}, a {form} of "
                f"shape {shape}; omit it, and AdamW updates it"
            )
        return {"matrices": None}

    def cost(self, entry: BucketEntry) -> int:
        """Return the operations: those of products of matrices, and a few of each element."""
        count, *sides = self.terms_of(entry)["matrices"] or (0, 0, 0)
        small, large = sorted(sides)
        times = -(-self.steps // together(small, large))
        products = 4 * large * times + 2 * small * (4 * self.steps - 3 * times)
        return 20 * prod(entry.shape) + count * small**2 * products

    def uses(self, slot: str, entry: BucketEntry) -> bool:
        """Return whether a parameter has the slot: matrices have no second moment."""
        return slot == "m" or self.terms_of(entry)["matrices"] is None

    def update(self, w: Array, g: Array, m: Array, v: Array, **numbers: Any) -> None:
        lr, decay, matrices = numbers["lr"], numbers["decay"], numbers.pop("matrices")
        if matrices is None:
            super().update(w, g, m, v, **{**numbers, "lr": self.adamw_lr_factor * lr})
            return
        sgd, u, (_, *shape) = self.backend.update.sgd, self.backend.xp.zeros_like(w), matrices
        sgd(u, g, m, lr=-1.0, decay=0.0, momentum=self.momentum, nesterov=self.nesterov)
        dtype = np.dtype("bfloat16" if self.bfloat16 else w.dtype)
        for matrix in u.reshape(matrices):
            orthogonalise(self.backend, matrix, self.steps, dtype)
        scale = 0.2 * max(shape) ** 0.5
        sgd(w, u, None, lr=scale * lr, decay=decay / scale, momentum=0.0, nesterov=False)


def orthogonalise(backend: Backend, u: Array, steps: int, dtype: np.dtype) -> None:
    """Replace the singular values of a matrix by numbers near 1, in place.

    Parameters
    ----------
    backend : Backend
        Of the products.
    u : Array (O, I)
    steps : int
        Newton-Schulz steps.
    dtype : numpy.dtype
        Type in which they are computed.
    """
    xp, linear, convert = backend.xp, backend.linear, backend.elementwise.convert
    wide = u.T if u.shape[0] > u.shape[1] else u  # the smaller of the two products x x'
    norm = backend.update.squared_norm(u.reshape(-1)) ** 0.5
    x = xp.empty(wide.shape, dtype)
    convert(wide / xp.maximum(norm, 1e-7), out=x)
    gram, step, total, other = (xp.empty((len(x), len(x)), dtype) for _ in range(4))
    product, (a, b, c) = xp.empty_like(x), COEFFICIENTS
    most = 1 if dtype.itemsize == 2 else together(*x.shape)
    for done in range(0, steps, most):
        linear.forward(x, x, None, out=gram)  # x x'; this matrix and its polynomials are symmetric
        last = min(most, steps - done) - 1
        for i in range(last + 1):
            linear.forward(gram, gram, None, out=step)
            step *= c
            step += b * gram
            step.reshape(-1)[:: len(x) + 1] += a
            if i == 0:
                total[...] = step
            else:
                linear.forward(total, step, None, out=other)
                total, other = other, total
            if i < last:
                linear.forward(gram, step, None, out=other)
                linear.forward(other, step, None, out=gram)
        linear.backward_data(total, x, out=product)
        x, product = product, x
    convert(x, out=wide)

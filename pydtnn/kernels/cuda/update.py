"""Updates of flat parameters on a GPU.

What changes from step to step (`lr`, `step`, the terms of Nadam's schedule) may be a number or one
float64 on the device, which a captured graph then reads anew.
"""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.layout import MOST_PARTS, THREADS, ceil, flat
from pydtnn.kernels.cuda.module import ELEMENTS
from pydtnn.kernels.cuda.own import Own, aligned, all_of, arithmetic, number
from pydtnn.kernels.reference import update as reference
from pydtnn.kernels.reference.family import Array


class Update(Own, reference.Update):
    """The rules of the optimizers; parameters as in the reference.

    Parameters and state are float32 or float64, gradients of the same type, or of 16 bits beside
    float32.
    """

    source = "update"

    def sgd(
        self,
        w: Array,
        g: Array,
        velocity: Array | None,
        *,
        lr: float | Array,
        decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Step along the gradient or, with a velocity, along its running sum."""
        if not _native(w, g, velocity):
            return super().sgd(
                w, g, velocity, lr=lr, decay=decay, momentum=momentum, nesterov=nesterov
            )
        terms = (*number(lr), float(decay), float(momentum), nesterov)
        self._step("sgd", w, g, (velocity,), terms)

    def rmsprop(
        self,
        w: Array,
        g: Array,
        square: Array,
        *,
        lr: float | Array,
        decay: float,
        rho: float,
        epsilon: float,
    ) -> None:
        """Step along the gradient over the root of its running mean square."""
        if not _native(w, g, square):
            return super().rmsprop(w, g, square, lr=lr, decay=decay, rho=rho, epsilon=epsilon)
        terms = (*number(lr), float(decay), float(rho), float(epsilon))
        self._step("rmsprop", w, g, (square,), terms)

    def adam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: float | Array,
        decay: float,
        step: int | Array,
        beta1: float,
        beta2: float,
        epsilon: float,
        decoupled: bool,
    ) -> None:
        """Adam, or with `decoupled` AdamW."""
        if not _native(w, g, m, v):
            return super().adam(
                *(w, g, m, v),
                lr=lr,
                decay=decay,
                step=step,
                beta1=beta1,
                beta2=beta2,
                epsilon=epsilon,
                decoupled=decoupled,
            )
        betas = (float(beta1), float(beta2), float(epsilon))
        terms = (*number(lr), float(decay), *number(step), *betas, decoupled)
        self._step("adam", w, g, (m, v), terms)

    def nadam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: float | Array,
        decay: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        mu: float | Array,
        mu_next: float | Array,
        mu_product: float | Array,
        step: int | Array,
    ) -> None:
        """Nadam with the momentum schedule's terms given."""
        if not _native(w, g, m, v):
            return super().nadam(
                *(w, g, m, v),
                lr=lr,
                decay=decay,
                beta1=beta1,
                beta2=beta2,
                epsilon=epsilon,
                mu=mu,
                mu_next=mu_next,
                mu_product=mu_product,
                step=step,
            )
        schedule = (*number(mu), *number(mu_next), *number(mu_product))
        betas = (float(beta1), float(beta2), float(epsilon))
        terms = (*number(lr), float(decay), *number(step), *betas, *schedule)
        self._step("nadam", w, g, (m, v), terms)

    def squared_norm(self, x: Array) -> Any:
        """Sum of squares of a flat array, added up in float64: an array () on the device."""
        if x.dtype.name not in ELEMENTS:
            return self.xp.square(x, dtype="float64").sum()
        x = self.xp.ascontiguousarray(x)
        width, each = _width(16 // x.itemsize, x)
        blocks = min(flat(x.size, each, 4), MOST_PARTS)
        out, partial = self.xp.empty((), "float64"), self.xp.empty(blocks, "float64")
        given = (x, out, x.size, partial, self.device.arrived)
        self.launch(f"squared_norm_{width}", x.dtype.name, (blocks,), (1, THREADS), *given)
        return out

    def scale(self, x: Array, factor: float | Array) -> None:
        """``x *= factor``, in place."""
        if not (x.dtype.name in ELEMENTS and x.flags.c_contiguous):
            return super().scale(x, factor)
        if x.size:
            width, each = _width(16 // x.itemsize, x)
            grid = (flat(x.size, each, 2),)
            given = (x, *number(factor), x.size)
            self.launch(f"scale_{width}", x.dtype.name, grid, (THREADS,), *given)

    def _step(
        self, rule: str, w: Array, g: Array, slots: tuple[Array | None, ...], terms: tuple[Any, ...]
    ) -> None:
        if not w.size:
            return
        g = self.xp.ascontiguousarray(g)
        width, each = _width(16 // w.itemsize, w, g, *slots)
        grid = (ceil(w.size, THREADS * each),)
        given = (w, g, *slots, w.size, *terms)
        self.launch(f"{rule}_{width}", g.dtype.name, grid, (THREADS,), *given)


def _native(w: Array, g: Array, *slots: Array | None) -> bool:
    """Whether the kernels take these; what they write to must not need a copy."""
    return g.dtype.name in ELEMENTS and all_of(arithmetic(g.dtype), w, *slots)


def _width(each: int, *arrays: Array | None) -> tuple[str, int]:
    return ("wide", each) if aligned(each, *arrays) else ("single", 1)

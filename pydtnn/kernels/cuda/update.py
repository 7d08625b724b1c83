"""Updates of flat parameters on a GPU.

What changes from step to step (`lr`, `step`, the terms of Nadam's schedule) may be a number or one
float64 on the device, which a captured graph then reads anew. Where the device's flag `go` is 0 the
rules change nothing.
"""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.layout import MAX_PARTS, THREADS, ceil, flat
from pydtnn.kernels.cuda.module import REALS, CudaKernels, all_of, number, vectors
from pydtnn.kernels.reference import update as reference
from pydtnn.kernels.reference.family import Array, Number

FLIGHT = 2
"""Vectors of a thread of a map, as in update.cu."""


class CudaUpdate(CudaKernels, reference.UpdateKernels):
    """The rules of the optimizers; slots and numbers are those of the reference.

    Parameters, gradients and state are all float32 or all float64.
    """

    source = "update"

    def sgd(self, w: Array, g: Array, *slots: Array | None, **numbers: Any) -> None:
        """Step along the gradient or, with a velocity, along its running sum."""
        if not _native(w, g, *slots):
            return super().sgd(w, g, *slots, **numbers)
        self._step("sgd", w, g, slots, _sgd(**numbers))

    def rmsprop(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Step along the gradient over the root of its running mean square."""
        if not _native(w, g, *slots):
            return super().rmsprop(w, g, *slots, **numbers)
        self._step("rmsprop", w, g, slots, _rmsprop(**numbers))

    def adam(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Adam, or with `decoupled` AdamW."""
        if not _native(w, g, *slots):
            return super().adam(w, g, *slots, **numbers)
        self._step("adam", w, g, slots, _adam(**numbers))

    def nadam(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Nadam with the momentum schedule's terms given."""
        if not _native(w, g, *slots):
            return super().nadam(w, g, *slots, **numbers)
        self._step("nadam", w, g, slots, _nadam(**numbers))

    def squared_norm(self, x: Array) -> Number:
        """Sum of squares of a flat array, added up in float64: an array () on the device."""
        if x.dtype.name not in REALS:
            return self.xp.square(x, dtype="float64").sum()
        x = self.xp.ascontiguousarray(x)
        width, each = vectors(0, x)
        blocks = min(flat(x.size, each, 4), MAX_PARTS)
        out, partial = self.xp.empty((), "float64"), self.xp.empty(blocks, "float64")
        given = (x, out, x.size, partial, self.device.arrived)
        self.launch(f"squared_norm_{width}", x.dtype.name, (blocks,), (1, THREADS), *given)
        return out

    def scale(self, x: Array, factor: Number) -> None:
        """``x *= factor``, in place."""
        if not (x.dtype.name in REALS and x.flags.c_contiguous):
            return super().scale(x, factor)
        self._map("scale", x, *number(factor))

    def unscale(self, g: Array, scale: Array, go: Array) -> None:
        """``g /= scale``, in place; clears `go` where an element of the result is not finite."""
        if not (g.dtype.name in REALS and g.flags.c_contiguous):
            g /= scale.astype(g.dtype)
            go *= self.xp.isfinite(g).all()
            return
        self._map("unscale", g, scale, go)

    def clip_factor(self, square: Number, limit: float) -> Number:
        """Compute ``min(1, limit / norm)`` on the device."""
        out = self.xp.empty((), "float64")
        self.step("clip_factor", 1, 1, *number(square), float(limit), out)
        return out

    def trust(
        self, lr: Number, square_w: Number, square_u: Number, *, factor: float, decay: float
    ) -> Number:
        """Scale a learning rate by the norms of a parameter and its step, on the device."""
        out = self.xp.empty((), "float64")
        numbers = (*number(lr), *number(square_w), *number(square_u))
        self.step("trust", 1, 1, *numbers, float(factor), float(decay), out)
        return out

    def watch(self, totals: Array, alive: Array, go: Array) -> None:
        """Clear `alive` for good where a total is not finite, and set `go` to `alive`."""
        self.step("watch", 1, THREADS, totals, alive, go, totals.size)

    def rescale(
        self,
        scale: Array,
        good: Array,
        go: Array,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        """Adapt the scale of the loss, in place."""
        factors = (float(growth), float(backoff), interval)
        self.step("rescale", 1, 1, scale, good, go, *factors)

    def _map(self, name: str, x: Array, *more: Any) -> None:
        if x.size:
            width, each = vectors(0, x)
            grid = (flat(x.size, each, FLIGHT),)
            self.launch(f"{name}_{width}", x.dtype.name, grid, (THREADS,), x, *more, x.size)

    def _step(
        self, rule: str, w: Array, g: Array, slots: tuple[Array | None, ...], terms: tuple[Any, ...]
    ) -> None:
        if not w.size:
            return
        g = self.xp.ascontiguousarray(g)
        width, each = vectors(0, w, g, *slots)
        grid = (ceil(w.size, THREADS * each),)
        given = (w, g, *slots, w.size, *terms, self.device.go)
        self.launch(f"{rule}_{width}", w.dtype.name, grid, (THREADS,), *given)


Terms = tuple[Any, ...]
"""Arguments of a kernel, in its order."""


def _sgd(*, lr: Number, decay: Number, momentum: float, nesterov: bool) -> Terms:
    return *number(lr), *number(decay), float(momentum), nesterov


def _rmsprop(*, lr: Number, decay: float, rho: float, epsilon: float) -> Terms:
    return *number(lr), float(decay), float(rho), float(epsilon)


def _adam(
    *,
    lr: Number,
    decay: float,
    step: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
    decoupled: bool,
) -> Terms:
    betas = float(beta1), float(beta2), float(epsilon)
    return *number(lr), float(decay), *number(step), *betas, decoupled


def _nadam(
    *,
    lr: Number,
    decay: float,
    step: Number,
    mu: Number,
    mu_next: Number,
    mu_product: Number,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> Terms:
    betas = float(beta1), float(beta2), float(epsilon)
    schedule = (*number(mu), *number(mu_next), *number(mu_product))
    return *number(lr), float(decay), *number(step), *betas, *schedule


def _native(w: Array, g: Array, *slots: Array | None) -> bool:
    """Whether the kernels take these; what they write to must not need a copy."""
    return w.dtype.name in REALS and g.dtype == w.dtype and all_of(w.dtype.name, w, *slots)

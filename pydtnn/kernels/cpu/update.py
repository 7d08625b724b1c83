"""Compiled updates of flat parameters."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cpu._update import UpdateKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native, require
from pydtnn.kernels.reference import update as reference
from pydtnn.kernels.reference.family import Array


class CpuUpdate(Compiled, reference.UpdateKernels):
    """The rules of the optimizers on the CPU; slots and numbers are those of the reference."""

    table = UpdateKernels

    def sgd(
        self, w: Array, g: Array, *slots: Array | None, scale: float = 1.0, **numbers: Any
    ) -> None:
        """SGD, with momentum if there is a velocity."""
        require(_native(w, g, *slots))
        self.kernels.sgd(w, contiguous(g), *slots, **numbers, scale=scale, threads=self.threads)

    def rmsprop(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """RMSProp."""
        require(_native(w, g, *slots))
        self.kernels.rmsprop(w, contiguous(g), *slots, **numbers, threads=self.threads)

    def adagrad(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Adagrad."""
        require(_native(w, g, *slots))
        self.kernels.adagrad(w, contiguous(g), *slots, **numbers, threads=self.threads)

    def lion(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Lion."""
        require(_native(w, g, *slots))
        shrink = 1 - numbers["lr"] * numbers.pop("decay")
        self.kernels.lion(w, contiguous(g), *slots, **numbers, shrink=shrink, threads=self.threads)

    def adam(self, w: Array, g: Array, *slots: Array, scale: float = 1.0, **numbers: Any) -> None:
        """Adam, or with `decoupled` AdamW."""
        require(_native(w, g, *slots))
        self.kernels.adam(w, contiguous(g), *slots, *_adam(**numbers), scale, self.threads)

    def nadam(self, w: Array, g: Array, *slots: Array, **numbers: Any) -> None:
        """Nadam with the momentum schedule's terms given."""
        require(_native(w, g, *slots))
        self.kernels.nadam(w, contiguous(g), *slots, *_nadam(**numbers), self.threads)

    def squared_norm(self, x: Array) -> float:
        """Sum of squares of a flat array, in float64."""
        require(native(x))
        return self.kernels.squared_norm(x, self.threads)

    def scale(self, x: Array, factor: float) -> None:
        """``x *= factor``, in place."""
        require(native(x))
        self.kernels.scale(x, factor, self.threads)


def _adam(
    *,
    lr: float,
    decay: float,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    decoupled: bool,
) -> tuple[float, ...]:
    """Return the factors of the compiled kernel."""
    shrink, decay = (1 - lr * decay, 0.0) if decoupled else (1.0, decay)
    rate, inv_root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    return rate, decay, shrink, beta1, beta2, inv_root, epsilon


def _nadam(
    *,
    lr: float,
    decay: float,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    mu: float,
    mu_next: float,
    mu_product: float,
) -> tuple[float, ...]:
    """Return the factors of the compiled kernel."""
    ahead, now = mu_next / (1 - mu_product * mu_next), (1 - mu) / (1 - mu_product)
    return lr, decay, beta1, beta2, (1 - beta2**step) ** -0.5, epsilon, ahead, now


def _native(w: Array, g: Array, *slots: Array | None) -> bool:
    """Return whether the kernels support these; outputs must not require a copy."""
    return native(w, g, *slots) and all(slot is None or slot.flags.carray for slot in slots)

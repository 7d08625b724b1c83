"""Compiled updates of flat parameters."""

from __future__ import annotations

from pydtnn.kernels.cpu._update import UpdateKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native
from pydtnn.kernels.reference import update as reference
from pydtnn.kernels.reference.family import Array


class Update(Compiled, reference.Update):
    """The rules of the optimizers on the CPU; parameters as in the reference."""

    table = UpdateKernels

    def sgd(
        self,
        w: Array,
        g: Array,
        velocity: Array | None,
        *,
        lr: float,
        decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """SGD, with momentum if there is a velocity."""
        if not _native(w, g, velocity):
            return super().sgd(
                w, g, velocity, lr=lr, decay=decay, momentum=momentum, nesterov=nesterov
            )
        self.kernels.sgd(w, contiguous(g), velocity, lr, decay, momentum, nesterov, self.threads)

    def rmsprop(
        self,
        w: Array,
        g: Array,
        square: Array,
        *,
        lr: float,
        decay: float,
        rho: float,
        epsilon: float,
    ) -> None:
        """RMSProp."""
        if not _native(w, g, square):
            return super().rmsprop(w, g, square, lr=lr, decay=decay, rho=rho, epsilon=epsilon)
        self.kernels.rmsprop(w, contiguous(g), square, lr, decay, rho, epsilon, self.threads)

    def adam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        decay: float,
        step: int,
        beta1: float,
        beta2: float,
        epsilon: float,
        decoupled: bool,
    ) -> None:
        """Adam, or with `decoupled` AdamW."""
        if not _native(w, g, m, v):
            return super().adam(
                w,
                g,
                m,
                v,
                lr=lr,
                decay=decay,
                step=step,
                beta1=beta1,
                beta2=beta2,
                epsilon=epsilon,
                decoupled=decoupled,
            )
        shrink, decay = (1 - lr * decay, 0.0) if decoupled else (1.0, decay)
        rate, inv_root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        factors = (rate, decay, shrink, beta1, beta2, inv_root, epsilon)
        self.kernels.adam(w, contiguous(g), m, v, *factors, self.threads)

    def nadam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        decay: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        mu: float,
        mu_next: float,
        mu_product: float,
        step: int,
    ) -> None:
        """Nadam with the momentum schedule's terms given."""
        if not _native(w, g, m, v):
            return super().nadam(
                w,
                g,
                m,
                v,
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
        ahead, now = mu_next / (1 - mu_product * mu_next), (1 - mu) / (1 - mu_product)
        inv_root = (1 - beta2**step) ** -0.5
        factors = (lr, decay, beta1, beta2, inv_root, epsilon, ahead, now)
        self.kernels.nadam(w, contiguous(g), m, v, *factors, self.threads)

    def squared_norm(self, x: Array) -> float:
        """Sum of squares of a flat array, in float64."""
        if not native(x):
            return super().squared_norm(x)
        return self.kernels.squared_norm(x, self.threads)

    def scale(self, x: Array, factor: float) -> None:
        """``x *= factor``, in place."""
        if not native(x):
            return super().scale(x, factor)
        self.kernels.scale(x, factor, self.threads)


def _native(w: Array, g: Array, *slots: Array | None) -> bool:
    """Return whether the kernels support these; outputs must not require a copy."""
    return native(w, g, *slots) and all(slot is None or slot.flags.carray for slot in slots)

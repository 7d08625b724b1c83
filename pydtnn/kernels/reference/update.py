"""Reference updates of flat parameters, in place, and computation of their coefficients.

All rules have one signature, ``rule(w, g, *slots, **numbers)``: the parameters `w`, the gradient
`g` (not changed) and the state arrays of the rule, all flat and of equal length, then its numbers
by name. A device overrides the rules with this signature. `decay` is the L2 coefficient added to
the gradient, except in AdamW and Lion, where it shrinks the parameter itself. `scale` is a factor
on the gradient, that of clipping.

A `Number` is a float here, and on a device possibly one float64 in its memory. Flags are float64
arrays (1,), 1 or 0: if the device's `go` is 0, parameters and state are not changed.
"""

from __future__ import annotations

import math

import numpy as np

from pydtnn.kernels.reference.family import Array, KernelFamily, Number


class UpdateKernels(KernelFamily):
    """The rules of the optimizers; ``step`` counts from 1."""

    def sgd(
        self,
        w: Array,
        g: Array,
        velocity: Array | None,
        *,
        lr: Number,
        decay: Number,
        momentum: float,
        nesterov: bool,
        scale: float = 1.0,
    ) -> None:
        """``v = momentum v + g``; ``w -= lr v``, or with Nesterov ``w -= lr (g + momentum v)``.

        Sutskever et al. 2013.
        """
        g = scale * g + decay * w
        if velocity is not None:
            velocity *= momentum
            velocity += g
            g = g + momentum * velocity if nesterov else velocity
        w -= lr * g

    def rmsprop(
        self,
        w: Array,
        g: Array,
        square: Array,
        *,
        lr: Number,
        decay: float,
        rho: float,
        epsilon: float,
    ) -> None:
        """``s = rho s + (1 - rho) g^2``; ``w -= lr g / (sqrt(s) + epsilon)``.

        Tieleman and Hinton 2012.
        """
        g = g + decay * w
        square *= rho
        square += (1 - rho) * g * g
        w -= lr * g / (self.xp.sqrt(square) + epsilon)

    def adagrad(
        self,
        w: Array,
        g: Array,
        square: Array,
        *,
        lr: Number,
        decay: float,
        initial: float,
        epsilon: float,
    ) -> None:
        """``s = s + g^2``; ``w -= lr g / (sqrt(s + initial) + epsilon)``.

        Duchi, Hazan and Singer 2011.
        """
        g = g + decay * w
        square += g * g
        w -= lr * g / (self.xp.sqrt(square + initial) + epsilon)

    def lion(
        self, w: Array, g: Array, m: Array, *, lr: Number, decay: float, beta1: float, beta2: float
    ) -> None:
        """``w -= lr (sign(beta1 m + (1 - beta1) g) + decay w)``; ``m = beta2 m + (1 - beta2) g``.

        Chen et al. 2023, algorithm 2.
        """
        sign = self.xp.sign(beta1 * m + (1 - beta1) * g)
        m *= beta2
        m += (1 - beta2) * g
        w *= 1 - lr * decay
        w -= lr * sign

    def adam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: Number,
        decay: float,
        step: Number,
        beta1: float,
        beta2: float,
        epsilon: float,
        decoupled: bool,
        scale: float = 1.0,
    ) -> None:
        """Adam (Kingma and Ba 2015, algorithm 1).

        `decoupled` makes it AdamW (Loshchilov and Hutter 2019, algorithm 2).
        """
        g = scale * g
        if decoupled:
            w *= 1 - lr * decay
        else:
            g = g + decay * w
        self._moments(g, m, v, beta1, beta2)
        denominator = self.xp.sqrt(v) / (1 - beta2**step) ** 0.5 + epsilon
        w -= lr / (1 - beta1**step) * m / denominator

    def nadam(
        self,
        w: Array,
        g: Array,
        m: Array,
        v: Array,
        *,
        lr: Number,
        decay: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        mu: Number,
        mu_next: Number,
        mu_product: Number,
        step: Number,
    ) -> None:
        """Nadam (Dozat 2016, algorithm 2) with the momentum schedule's terms given.

        `mu` and `mu_next` are the schedule at this step and the next, `mu_product` the product up
        to this step.
        """
        g = g + decay * w
        self._moments(g, m, v, beta1, beta2)
        denominator = self.xp.sqrt(v) / (1 - beta2**step) ** 0.5 + epsilon
        ahead = mu_next / (1 - mu_product * mu_next) * m + (1 - mu) / (1 - mu_product) * g
        w -= lr * ahead / denominator

    @staticmethod
    def _moments(g: Array, m: Array, v: Array, beta1: float, beta2: float) -> None:
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * g * g

    def squared_norm(self, x: Array) -> Number:
        """Sum of squares of a flat array, in float64."""
        return float(self.xp.square(x, dtype="float64").sum())

    def scale(self, x: Array, factor: Number) -> None:
        """``x *= factor``, in place."""
        x *= factor

    # -- numbers of a step

    def clip_factor(self, square: Number, limit: float) -> Number:
        """Compute the clipping factor for a squared norm of gradients: ``min(1, limit / norm)``.

        Pascanu et al. 2013, algorithm 1. Gradients that are not finite are not scaled: such a
        factor would make the padding between parameters NaN permanently.
        """
        norm = math.sqrt(square)
        return limit / norm if limit < norm < math.inf else 1.0

    def trust(
        self, lr: Number, square_w: Number, square_u: Number, *, factor: float, decay: float
    ) -> Number:
        """Scale a learning rate: ``lr factor |w| / (|u| + decay |w|)``, `lr` if either is 0.

        `square_w` and `square_u` are the squared norms of a parameter and of its step. You et al.
        2017 (LARS) and 2020 (LAMB).
        """
        norm_w, norm_u = math.sqrt(square_w), math.sqrt(square_u)
        if norm_w and norm_u:
            return lr * (factor * norm_w / (norm_u + decay * norm_w))
        return lr

    def watch(self, totals: Array, alive: Array, go: Array) -> None:
        """Clear `alive` permanently if a total is not finite, and set `go` to `alive`."""
        alive *= np.isfinite(totals).all()
        go[...] = alive

    def unscale(self, g: Array, scale: Array, go: Array) -> None:
        """``g /= scale``, in place; clears `go` if an element of the result is not finite."""
        g /= g.dtype.type(scale[0])
        go *= np.isfinite(g).all()

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
        """Update the scale of the loss, in place: dynamic loss scaling.

        A valid step increments `good`; after `interval` of them `scale` is increased. After a
        skipped step (`go` is 0) it is reduced, and `good` is reset. Micikevicius et al. 2018,
        section 3.2.

        Parameters
        ----------
        scale, good, go : Array, shape (1,), float64
        growth, backoff : float
            Factors above and below 1.
        interval : int
            Number of consecutive steps.
        """
        good[...] = good + 1 if go[0] else 0
        if not go[0]:
            scale *= backoff
        elif good[0] >= interval:
            scale *= growth
            good[...] = 0

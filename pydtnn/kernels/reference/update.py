"""Reference updates of flat parameters, in place.

Each takes the parameters `w`, the gradient `g` (left as it is) and the state arrays, all flat and
of equal length. `decay` is the L2 coefficient added to the gradient, except in AdamW, where it
shrinks the parameter itself.
"""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array, Family


class Update(Family):
    """The rules of the optimizers; ``step`` counts from 1."""

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
        """``v = momentum v + g``; ``w -= lr v``, or with Nesterov ``w -= lr (g + momentum v)``.

        Sutskever et al. 2013.
        """
        g = g + decay * w
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
        lr: float,
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
        """Adam (Kingma and Ba 2015, algorithm 1).

        `decoupled` makes it AdamW (Loshchilov and Hutter 2019, algorithm 2).
        """
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

    def squared_norm(self, x: Array) -> float:
        """Sum of squares of a flat array, added up in float64."""
        return float(self.xp.square(x, dtype="float64").sum())

    def scale(self, x: Array, factor: float) -> None:
        """``x *= factor``, in place."""
        x *= factor

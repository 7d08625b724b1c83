"""Rules that scale each element's step: RMSProp, Adagrad, Lion, Adam and its variants."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.optimizers.base import Optimizer
from pydtnn.schedules import Schedule
from pydtnn.utils.option import option


class RMSProp(Optimizer):
    """``s = rho s + (1 - rho) g^2``; ``w -= lr g / (sqrt(s) + epsilon)``.

    `g` includes ``decay w``.

    Parameters
    ----------
    lr : float or Schedule
    rho : float
        In [0, 1).
    epsilon : float
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5, 2012.
    """

    slots = ("square",)
    capturable = True
    rho: float = option(0.99, at_least=0, below=1)
    epsilon: float = option(1e-8, above=0)

    def update(
        self, w: Array, g: Array, square: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        self.backend.update.rmsprop(
            w, g, square, lr=lr, decay=decay, rho=self.rho, epsilon=self.epsilon
        )


class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of the squares of all gradients so far.

    ``s = s + g^2``; ``w -= lr g / (sqrt(s + initial) + epsilon)``. `g` includes ``decay w``.

    Parameters
    ----------
    lr : float or Schedule
    initial : float
        Value of the sums before the first update.
    epsilon : float
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12, 2011, figure 1 with diagonal matrices.
    """

    slots = ("square",)
    initial: float = option(0.0, at_least=0)
    epsilon: float = option(1e-10, above=0)

    def update(
        self, w: Array, g: Array, square: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        self.backend.update.adagrad(
            w, g, square, lr=lr, decay=decay, initial=self.initial, epsilon=self.epsilon
        )


class Lion(Optimizer):
    """Steps of equal size in the direction of the sign of a running mean of the gradients.

    ``w -= lr (sign(beta1 m + (1 - beta1) g) + decay w)``; ``m = beta2 m + (1 - beta2) g``. Every
    element changes by `lr`: the paper uses a third to a tenth of the learning rate of AdamW, and as
    much more weight decay.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1): weights of the running mean in the step, and in the next running mean.
    weight_decay, clip_norm, groups
        See `Optimizer`; the decay is decoupled, as that of `AdamW`.

    References
    ----------
    Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """

    default_lr = 1e-4
    slots = ("m",)
    beta1: float = option(0.9, at_least=0, below=1)
    beta2: float = option(0.99, at_least=0, below=1)

    def update(
        self, w: Array, g: Array, m: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        self.backend.update.lion(w, g, m, lr=lr, decay=decay, beta1=self.beta1, beta2=self.beta2)


class Adam(Optimizer):
    """Running mean of the gradients divided by the root of the running mean of their squares.

    ``m = beta1 m + (1 - beta1) g``; ``v = beta2 v + (1 - beta2) g^2``;
    ``w -= lr m^ / (sqrt(v^) + epsilon)`` with ``m^ = m / (1 - beta1^t)`` and ``v^ = v / (1 -
    beta2^t)``; `g` includes ``decay w``.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1).
    epsilon : float
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.
    """

    default_lr = 0.001
    slots: tuple[str, ...] = ("m", "v")
    capturable = scales = True
    decoupled = False
    beta1: float = option(0.9, at_least=0, below=1)
    beta2: float = option(0.999, at_least=0, below=1)
    epsilon: float = option(1e-8, above=0)

    def update(
        self, w: Array, g: Array, m: Array, v: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        numbers: dict[str, Any] = self._betas() | self.factor
        self.backend.update.adam(
            *(w, g, m, v), lr=lr, decay=decay, step=step, decoupled=self.decoupled, **numbers
        )

    def _betas(self) -> dict[str, float]:
        return {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}


class AdamW(Adam):
    """Adam with decoupled weight decay, a factor ``1 - lr decay`` on the parameters.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1).
    epsilon : float
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
    """

    decoupled = capturable = scales = True
    weight_decay: float = option(0.01, at_least=0)


class ScheduleFreeAdamW(AdamW):
    """AdamW that averages its steps instead of reducing the learning rate.

    With ``y = x + offset = (1 - beta1) z + beta1 x``, where gradients are computed, and ``s = lr
    sqrt(1 - beta2^t) (g / (sqrt(v) + epsilon) + decay y)``: ``z -= s``; ``x += c (z - x)``. The
    average x is evaluated and saved (`Optimizer.offset`); a further `fit` starts from it.
    Checkpoints contain y. The weight c is ``r^2 / sum r^2`` with the largest rate r of the
    schedule so far, without `lr_factor`: the schedule is a constant, possibly after a warm-up.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1): the weight of x in y, and that of the running mean of the squares.
    epsilon : float
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Defazio et al., "The road less scheduled", NeurIPS 2024, algorithm 1.
    """

    default_lr = 0.0025
    slots = ("offset", "v")
    offset = "offset"
    weight_decay: float = option(0.0, at_least=0)

    def __init__(self, lr: float | Schedule | None = None, **options: Any) -> None:
        super().__init__(lr, **options)
        self._weights: tuple[Any, int, float, float] = (None, 0, 0.0, 0.0)

    def terms(self, step: int) -> dict[str, float]:
        """Compute the weight of this update in the average, from the rates of all so far."""
        schedule, done, largest, total = self._weights
        if schedule is not self.schedule or done >= step:
            done, largest, total = 0, 0.0, 0.0
        for t in range(done + 1, step + 1):
            largest = max(largest, self.schedule(t - 1) * (1 - self.beta2**t) ** 0.5)
            total += largest**2
        self._weights = self.schedule, step, largest, total
        return {"weight": largest**2 / total if total else 0.0}

    def update(self, w: Array, g: Array, *slots: Any, **numbers: Any) -> None:
        offset, v = slots
        v *= self.beta2
        v += (1 - self.beta2) * g * g
        lr = numbers["lr"] * (1 - self.beta2 ** numbers["step"]) ** 0.5
        s = lr * (g / (self.backend.xp.sqrt(v) + self.epsilon) + numbers["decay"] * w)
        before = offset.copy()  # (1 - beta1) (z - x)
        offset -= (1 - self.beta1) * s
        offset *= 1 - numbers["weight"]
        w += self.beta1 / (1 - self.beta1) * (before - offset) - s


class Nadam(Adam):
    """Adam with Nesterov's momentum and a momentum that increases to `beta1`.

    ``mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)``; ``w -= lr (mu_{t+1} m / (1 - prod_{i <= t+1}
    mu_i) + (1 - mu_t) g / (1 - prod_{i <= t} mu_i)) / (sqrt(v^) + epsilon)``, with the moments of
    `Adam`.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1).
    epsilon : float
    momentum_decay : float
        Rate at which the momentum increases.
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016, algorithm 2; as in
    PyTorch's NAdam.
    """

    default_lr = 0.002
    capturable = True
    momentum_decay: float = option(0.004, at_least=0)

    def __init__(self, lr: float | Schedule | None = None, **options: Any) -> None:
        super().__init__(lr, **options)
        self._product = (0, 1.0)

    def terms(self, step: int) -> dict[str, float]:
        """Compute this update's momentum and the next one's, and the product of all so far."""
        return {
            "mu": self._momentum(step),
            "mu_next": self._momentum(step + 1),
            "mu_product": self._momentum_product(step),
        }

    def update(self, w: Array, g: Array, m: Array, v: Array, **numbers: Any) -> None:
        self.backend.update.nadam(w, g, m, v, **self._betas(), **numbers)

    def _momentum(self, step: int) -> float:
        return self.beta1 * (1 - 0.5 * 0.96 ** (step * self.momentum_decay))

    def _momentum_product(self, step: int) -> float:
        """Multiply the momenta up to `step`, in order: a resumed run gets the same bits."""
        done, product = self._product if self._product[0] <= step else (0, 1.0)
        for i in range(done + 1, step + 1):
            product *= self._momentum(i)
        self._product = (step, product)
        return product

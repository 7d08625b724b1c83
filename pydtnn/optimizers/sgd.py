"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.optimizers.base import Optimizer
from pydtnn.schedules import Schedule
from pydtnn.utils.option import option


class SGD(Optimizer):
    """``v = momentum v + g``; ``w -= lr v``, or with Nesterov ``w -= lr (g + momentum v)``.

    `g` includes ``decay w``.

    Parameters
    ----------
    lr : float or Schedule
    momentum : float
        In [0, 1). With 0 no velocity is stored.
    nesterov : bool
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, section 2. The learning rate multiplies the velocity (as in PyTorch), so a change of it
    takes effect immediately.
    """

    default_lr = 0.05
    capturable = scales = True
    momentum: float = option(0.0, at_least=0, below=1)
    nesterov: bool = option(False)

    def __init__(self, lr: float | Schedule | None = None, **options: Any) -> None:
        super().__init__(lr, **options)
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov requires a momentum above 0, got 0; use momentum=0.9")
        if self.momentum:
            self.slots = ("velocity",)

    def update(
        self,
        w: Array,
        g: Array,
        velocity: Array | None = None,
        *,
        lr: Number,
        decay: float,
        step: Number,
    ) -> None:
        numbers = self.factor | {"lr": lr, "decay": decay, "nesterov": self.nesterov}
        self.backend.update.sgd(w, g, velocity, momentum=self.momentum, **numbers)

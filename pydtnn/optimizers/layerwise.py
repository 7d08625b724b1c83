"""Rules for large batches, which scale each parameter's step by its norm: LARS and LAMB.

A parameter without weight decay (biases, norms, or all with ``weight_decay=0``) takes its unscaled
step, as is usual: its norm is not a meaningful scale for the step. With `always_adapt` every
parameter is scaled.

Norms and the rates computed from them remain on the device, without synchronisation.
"""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.optimizers.adaptive import Adam
from pydtnn.optimizers.base import Optimizer
from pydtnn.utils.option import option


class LARS(Optimizer):
    """SGD with momentum and a learning rate that is scaled per parameter.

    ``r = trust |w| / (|g| + decay |w|)``; ``v = momentum v + lr r (g + decay w)``; ``w -= v``.
    If `w` or `g` is 0, and without decay, ``r = 1``.

    Parameters
    ----------
    lr : float or Schedule
    momentum : float
        In [0, 1).
    trust : float
        The paper's eta: the relative change of a parameter's norm in a step with ``lr = 1``.
    always_adapt : bool
        Scale parameters without decay too.
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
    """

    default_lr = 1.0
    slots = ("velocity",)
    per_parameter = True
    capturable = True
    momentum: float = option(0.9, at_least=0, below=1)
    trust: float = option(0.001, above=0)
    always_adapt: bool = option(False)
    weight_decay: float = option(1e-4, at_least=0)

    def update(
        self, w: Array, g: Array, velocity: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        kernels = self.backend.update
        if decay or self.always_adapt:
            squares = kernels.squared_norm(w), kernels.squared_norm(g)
            lr = kernels.trust(lr, *squares, factor=self.trust, decay=decay)
        # The paper keeps lr inside v: v = momentum v + (lr r g) + (lr r decay) w; w -= 1 v.
        g = g.copy()
        kernels.scale(g, lr)
        kernels.sgd(
            w, g, velocity, lr=1.0, decay=lr * decay, momentum=self.momentum, nesterov=False
        )


class LAMB(Adam):
    """Adam with steps scaled per parameter to the norm of the parameter.

    ``u = m^ / (sqrt(v^) + epsilon) + decay w``; ``w -= lr (|w| / |u|) u``. Where `w` or `u` is 0,
    and without decay, the ratio is 1.

    Parameters
    ----------
    lr : float or Schedule
    beta1, beta2 : float
        In [0, 1).
    epsilon : float
    always_adapt : bool
        Scale parameters without decay too.
    weight_decay, clip_norm, groups
        See `Optimizer`.

    References
    ----------
    You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR
    2020, algorithm 2.
    """

    per_parameter = True
    capturable = True
    epsilon: float = option(1e-6, above=0)
    always_adapt: bool = option(False)
    weight_decay: float = option(0.01, at_least=0)

    def update(
        self, w: Array, g: Array, m: Array, v: Array, *, lr: Number, decay: float, step: Number
    ) -> None:
        kernels = self.backend.update
        u = decay * w
        super().update(u, g, m, v, lr=-1.0, decay=0.0, step=step)  # u += m^ / (sqrt(v^) + epsilon)
        if decay or self.always_adapt:
            squares = kernels.squared_norm(w), kernels.squared_norm(u)
            lr = kernels.trust(lr, *squares, factor=1.0, decay=0.0)
        kernels.sgd(w, u, None, lr=lr, decay=0.0, momentum=0.0, nesterov=False)

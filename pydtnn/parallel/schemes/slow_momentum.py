"""SlowMo: independent steps, whose average moves with momentum."""

from __future__ import annotations

import numpy as np

from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.diloco import DiLoCo


class SlowMo(DiLoCo):
    """Local SGD whose averages move with a slow momentum, in units of the learning rate.

    Every `period` steps, with d the difference of the outer parameters and the mean of the ranks:
    ``u <- momentum u + d / lr``; ``c <- c - rate lr u``; ``w_i <- c``, with the learning rate of
    the last step; with one of 0, ``c <- c - d``. If the learning rate is constant, this is `DiLoCo`
    with heavy-ball in place of Nesterov momentum. The inner optimizer keeps its local state
    ("maintain" in the paper). Everything else is as in `DiLoCo`.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps from one average to the next; the paper's tau.
    rate, momentum : float
        The paper's alpha and beta.

    References
    ----------
    Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed SGD with
    slow momentum", ICLR 2020, algorithm 1.
    """

    period: int = option(12, at_least=1)
    rate: float = option(1.0, above=0)
    momentum: float = option(0.7, at_least=0, below=1)

    def outer_step(
        self, outer: np.ndarray, velocity: np.ndarray, change: np.ndarray, lr: float
    ) -> None:
        if lr == 0:
            outer -= change
        else:
            velocity *= self.momentum
            velocity += change / lr
            outer -= self.rate * lr * velocity

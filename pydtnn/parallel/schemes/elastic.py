"""Elastic averaging: ranks train independently, coupled by springs to a common centre."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option


class ElasticAveraging(GradientExchange):
    """Every `period` steps, parameters of ranks and a common centre move towards each other.

    ``d_i = a (w_i - c)``, ``a = beta / P``; ``w_i <- U(w_i - d_i, g_i(w_i))``; ``c <- c + sum_i
    d_i``: the symmetric, synchronous variant, in which each spring moves both its ends equally.
    Between pulls ranks step independently; the centre averages over ranks and time. The centre is
    evaluated, saved, and the result of training.

    All ranks have the same centre; parameters and the optimizer's state are local. Ranks have equal
    weight, independent of their samples; a rank without samples in a step skips the update.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps between two pulls; the paper's tau.
    beta : float
        Fraction in (0, 1] by which the centre moves towards the ranks' mean in one pull.

    References
    ----------
    Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, equations 5
    and 6, with the period of section 3.1.
    """

    period: int = option(4, at_least=1)
    beta: float = option(0.9, above=0, at_most=1)
    centre: Sequence[np.ndarray] = ()

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks and to the centre."""
        super().broadcast_parameters()
        self.centre = [bucket.values.copy() for bucket in self.buckets]

    def loss_scale(self, local: int, total: int) -> float:
        return 1 / max(local, 1)

    def update(self, optimizer: Optimizer) -> None:
        if optimizer.iterations % self.period == 0:
            self.pull()
        self.step_alone(optimizer)

    def pull(self) -> None:
        """Move the ranks and the centre towards each other."""
        for bucket, centre in zip(self.buckets, self.centre, strict=True):
            pull = self.beta / self.comm.size * (bucket.values - centre)
            bucket.values[...] -= pull
            self.comm.allreduce(pull)
            centre += pull
        self.met = True

    def average_parameters(self) -> None:
        """Replace the parameters by the centre."""
        for bucket, centre in zip(self.buckets, self.centre, strict=True):
            bucket.values[...] = centre

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return {"centre": self.centre}

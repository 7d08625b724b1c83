"""Elastic averaging: ranks train alone, held together by springs to a common centre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange, by_name, from_names
from pydtnn.parallel.option import option


class ElasticAveraging(GradientExchange):
    """Every `period` steps the ranks pull a centre towards themselves, and it pulls them back.

    ``d_i = a (w_i - c)``, ``a = beta / P``; ``w_i <- U(w_i - d_i, g_i(w_i))``; ``c <- c + sum_i
    d_i``: the symmetric, synchronous variant, in which each spring moves both its ends by as much.
    Between pulls ranks step alone and explore; the centre averages over ranks and time. Evaluated
    and saved is the centre, and training ends with it.

    All ranks hold the same centre; their parameters and the optimizer's state are their own. Ranks
    count alike, whatever their samples; one that has none in a step makes no update in it.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps between two pulls; the paper's tau.
    beta : float
        In (0, 1]: how far the centre follows the ranks' mean in one pull.

    References
    ----------
    Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, equations 5
    and 6, with the period of section 3.1.
    """

    period: int = option(4, at_least=1)
    beta: float = option(0.9, above=0, at_most=1)
    centre: Sequence[np.ndarray] = ()

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters, also into the centre."""
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

    def average_parameters(self) -> None:
        """Take the centre, which is the average that counts here."""
        for bucket, centre in zip(self.buckets, self.centre, strict=True):
            bucket.values[...] = centre

    def state(self) -> dict[str, Any]:
        return super().state() | by_name("centre", self.buckets, self.centre)

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        from_names("centre", self.buckets, self.centre, state)

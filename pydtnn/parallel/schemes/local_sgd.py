"""Local SGD and post-local SGD: ranks train independently with periodic averaging."""

from __future__ import annotations

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange, average_by_samples
from pydtnn.parallel.option import option


class LocalSGD(GradientExchange):
    """Ranks step independently, and average their parameters every `period` steps.

    ``w_i <- U(w_i, g_i(w_i))``; every `period` steps ``w_i <- sum_j n_j w_j / sum_j n_j``, with n_j
    the samples that rank j has trained on since the last average. The communication volume is
    1 / `period` of that of all-reduce.

    With period 1 and an optimizer without state this is plain SGD, including uneven batches. The
    optimizer's state (momentum, moments) is local: it depends on the rank's own gradients and is
    not averaged. As momentum is linear, period 1 with equal shards is still plain SGD; with Adam it
    is not. Gradients are clipped by the norm of the rank's own gradients. A rank without samples in
    a step, as in a short last batch, skips the update.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps from one average to the next.

    References
    ----------
    Stich, "Local SGD converges fast and communicates little", ICLR 2019, algorithm 1.
    """

    period: int = option(8, at_least=1)

    def loss_scale(self, local: int, total: int) -> float:
        return 1 / max(local, 1)

    def update(self, optimizer: Optimizer) -> None:
        self.step_alone(optimizer)
        if optimizer.iterations % self.period == 0:
            self.average_parameters()


class PostLocalSGD(LocalSGD):
    """Synchronous SGD for the first `after` steps, then local SGD.

    While the loss decreases fast, large averaged steps are best; later, local steps generalise
    better and communicate less. In the first phase gradients are averaged instead of parameters,
    weighted by the samples of the step: parameters and the optimizer's state are equal on all
    ranks, and the result is that of `AllReduce` within rounding, with any optimizer and clipping.

    Parameters
    ----------
    comm : Communicator
    after : int
        Number of synchronous steps. The paper switches at the first reduction of the learning rate.
    period : int
        Period of `LocalSGD` after these steps.

    References
    ----------
    Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020, section 3.
    """

    after: int = option(0, at_least=0)

    def update(self, optimizer: Optimizer) -> None:
        if optimizer.iterations < self.after:
            average_by_samples(self, (bucket.grads for bucket in self.buckets))
            optimizer.step()
        else:
            super().update(optimizer)

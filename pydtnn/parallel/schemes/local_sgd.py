"""Local SGD, and post-local SGD: ranks train alone and average their parameters now and then."""

from __future__ import annotations

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option


class LocalSGD(GradientExchange):
    """Ranks step alone, and average their parameters every `period` steps.

    ``w_i <- U(w_i, g_i(w_i))``; every `period` steps ``w_i <- sum_j n_j w_j / sum_j n_j``, with n_j
    the samples that rank j has trained on since. It says 1 / `period` of what all-reduce says.

    With period 1 and an optimizer without state this is plain SGD, uneven batches included. The
    optimizer's state (momentum, moments) stays local: each rank's knows of its own gradients only,
    and is not averaged. As momentum is linear, with period 1 and equal shards it still comes to
    plain SGD; Adam does not. Clipping is by the norm of a rank's own gradients. A rank that has no
    samples in a step, as in a short last batch, makes no update in it.

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

    Where the loss still falls fast, large averaged steps are best; later, local steps generalise
    better and say less. In the first phase gradients are averaged instead of parameters, weighted
    by the samples of the step: parameters and the optimizer's state are equal on all ranks then,
    and it is `AllReduce` within rounding, with any optimizer and clipping.

    Parameters
    ----------
    comm : Communicator
    after : int
        Synchronous steps. The paper changes over where it first lowers the learning rate.
    period : int
        Of `LocalSGD`, afterwards.

    References
    ----------
    Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020, section 3.
    """

    after: int = option(0, at_least=0)

    def update(self, optimizer: Optimizer) -> None:
        if optimizer.iterations < self.after:
            self.average(bucket.grads for bucket in self.buckets)
            optimizer.step()
        else:
            super().update(optimizer)

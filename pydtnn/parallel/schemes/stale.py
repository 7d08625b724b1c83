"""k-step-stale gradients: sums are applied k steps later, so that communication is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option
from pydtnn.utils.request import Completed, Request


class LateBucket:
    """A bucket's gradients of one step, in a separate array with a pending request."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = replace(bucket, grads=np.zeros_like(bucket.grads))
        self.request: Request = Completed()


class StaleGradients(GradientExchange):
    """Synchronous data parallelism with the sums of gradients from `delay` steps ago.

    ``w(t + 1) = U(w(t), sum_i g_i(w(t - k)))``, with k = `delay`; where t < k the gradients are 0,
    so that only weight decay acts. Messages overlap with k whole steps, and are hidden if they take
    less time. Parameters and the optimizer's state are equal on all ranks; k = 0 is `AllReduce`.
    The delay reduces the largest stable learning rate roughly by 1 / (k + 1), more with momentum.
    Memory for k + 1 sets of gradients is required.

    Checkpoints contain the k sums that have not been applied, for any number of ranks. Before an
    evaluation pending messages are completed, but their sums are applied k steps later as usual;
    the last k sums of training are applied only if it continues with another `fit`.

    Parameters
    ----------
    comm : Communicator
    delay : int
        k, in steps.

    References
    ----------
    Li et al., "Pipe-SGD: a decentralized pipelined SGD framework for distributed deep net
    training", NeurIPS 2018, algorithm 1 (iteration dependency K = k + 1). Ho et al., "More
    effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013, show
    that a bounded delay converges.
    """

    equal = sums_gradients = keeps_gradients = True
    delay: int = option(1, at_least=0)
    steps: Sequence[dict[int, LateBucket]] = ()

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Start with gradients of 0; the newest are first."""
        super().start(buckets)
        self.steps = [{b.index: LateBucket(b) for b in buckets} for _ in range(self.delay + 1)]

    def bucket_ready(self, bucket: Bucket) -> None:
        """Start to sum a copy of the bucket's gradients, as backward overwrites them."""
        late = self.steps[0][bucket.index]
        late.bucket.grads[...] = bucket.grads
        late.request = self.sums.start(late.bucket)
        self.in_flight.add(late.request)

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step(self.wait)
        self.steps = [self.steps[-1], *self.steps[:-1]]

    def wait(self, bucket: Bucket) -> None:
        """Replace the bucket's gradients by the sum of `delay` steps ago."""
        late = self.steps[-1][bucket.index]
        late.request.wait()
        bucket.grads[...] = late.bucket.grads

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return {
            f"delayed{age}": [self.steps[age][bucket.index].bucket.grads for bucket in self.buckets]
            for age in range(1, self.delay + 1)
        }

    def state(self) -> dict[str, Any]:
        return super().state() | {"delay": self.delay}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`.

        Raises
        ------
        ValueError
            If the state was saved with another delay.
        """
        if state["delay"] != self.delay:
            raise ValueError(
                f"StaleGradients: delay must be {state['delay']} as in the checkpoint, got "
                f"{self.delay}; continue with the same delay"
            )
        super().load(state)

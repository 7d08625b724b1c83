"""k-step-stale gradients: a sum has k whole steps to arrive, so that no rank waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Completed, Request
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange, by_name, from_names
from pydtnn.parallel.option import option


class Late:
    """A bucket's gradients of one step, on their way in an array of their own."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = replace(bucket, grads=np.zeros_like(bucket.grads))
        self.request: Request = Completed()


class StaleGradients(GradientExchange):
    """Synchronous data parallelism with the sums of gradients from `delay` steps ago.

    ``w(t + 1) = U(w(t), sum_i g_i(w(t - k)))``, with k = `delay`; where t < k the gradients are 0,
    so that only weight decay acts. Messages overlap k whole steps, and cost nothing as long as they
    last less. Parameters and the optimizer's state are equal on all ranks; k = 0 is `AllReduce`.
    The price is the delay itself: the largest stable learning rate falls roughly as 1 / (k + 1),
    more so with momentum. It takes memory for k + 1 sets of gradients.

    Checkpoints hold the k sums that have not been applied, whatever the number of ranks. Before an
    evaluation what is under way is completed, but applied in its turn only; the last k sums of
    training are if it goes on by another `fit`.

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
    steps: Sequence[dict[int, Late]] = ()

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Begin with gradients of 0; the newest come first."""
        super().start(buckets)
        self.steps = [{b.index: Late(b) for b in buckets} for _ in range(self.delay + 1)]

    def bucket_ready(self, bucket: Bucket) -> None:
        """Start to sum a copy of the bucket's gradients: backward will write the next over them."""
        late = self.steps[0][bucket.index]
        late.bucket.grads[...] = bucket.grads
        late.request = self.sums.start(late.bucket)
        self.under_way.add(late.request)

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step(self.wait)
        self.steps = [self.steps[-1], *self.steps[:-1]]

    def wait(self, bucket: Bucket) -> None:
        """Put the sum of `delay` steps ago into the bucket's gradients."""
        late = self.steps[-1][bucket.index]
        late.request.wait()
        bucket.grads[...] = late.bucket.grads

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Complete what is under way, as training may end here; parameters are equal anyway."""
        self.drain()
        with super().averaged():
            yield

    def state(self) -> dict[str, Any]:
        self.drain()
        state = super().state()
        for age in range(1, self.delay + 1):
            arrays = [self.steps[age][bucket.index].bucket.grads for bucket in self.buckets]
            state |= by_name(f"delayed{age}", self.buckets, arrays)
        return state | {"delay": self.delay}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned.

        Raises
        ------
        ValueError
            If it was saved with another delay.
        """
        if state["delay"] != self.delay:
            raise ValueError(
                f"StaleGradients: delay must be {state['delay']} as in the checkpoint, got "
                f"{self.delay}; continue with the same delay"
            )
        super().load(state)
        for age in range(1, self.delay + 1):
            arrays = [self.steps[age][bucket.index].bucket.grads for bucket in self.buckets]
            from_names(f"delayed{age}", self.buckets, arrays, state)

"""1-bit Adam: after some steps the variance is constant, and ranks send signs of their momentum."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.optimizers import AdamW, Optimizer
from pydtnn.parallel.compression.quantised import sign
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option


class OneBitAdam(GradientExchange):
    """Adam with sums of gradients for `warm_up` steps, and then with sums of 1-bit momenta.

    In the first steps, ranks sum gradients, and each updates with `AdamW`. Then v is constant:
    ``m <- sum_i C(beta1 m / P + (1 - beta1) g_i)``; ``w <- w - lr (m^ / (sqrt(v^) + epsilon) +
    decay w)``, with the sums, m and v of all ranks equal, and corrections of the bias as in `Adam`
    (the paper has none). C is the compressor `sign` with `served`: one bit for each element and a
    scale for each block of 128, to the rank that serves its part of a bucket, and again from there,
    both with feedback of the error: about 1/26 of the bytes of all-reduce, in float32.

    Elements whose v is 0, as they had no gradient before, are only decayed.

    Parameters
    ----------
    comm : Communicator
    warm_up : int
        Steps with sums of gradients; about a fifth of all in the paper.

    Raises
    ------
    ValueError
        By the trainer, if the update rule is not `AdamW`, or clips gradients.

    References
    ----------
    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
    speed", ICML 2021, algorithm 1.
    """

    equal = keeps_gradients = True
    warm_up: int = option(100, at_least=1)

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self.momenta = sign(served=True)(comm)
        self._all_sums.append(self.momenta)

    def check(self, optimizer: Optimizer) -> None:
        if type(optimizer) is not AdamW or optimizer.clip_norm is not None:
            raise ValueError(f"OneBitAdam: expected AdamW without clip_norm, got {optimizer!r}")

    def update(self, optimizer: Optimizer) -> None:
        if optimizer.iterations < self.warm_up:
            optimizer.step(lambda bucket: self.comm.allreduce(bucket.grads))
            return
        rule, terms = cast(AdamW, optimizer), optimizer.next_terms()
        for bucket in self.buckets:
            mean = rule.beta1 / self.comm.size * rule.slots_of(bucket)["m"]
            bucket.grads[...] = mean + (1 - rule.beta1) * bucket.grads
            self.in_flight.put(bucket, self.momenta.start(bucket))
        for bucket in self.buckets:
            self.in_flight.pop(bucket).wait()
            m, v = rule.slots_of(bucket).values()
            m[...] = bucket.grads
            scale = np.sqrt(v / (1 - rule.beta2**self.warm_up)) + rule.epsilon
            change = (v > 0) * m / (1 - rule.beta1 ** terms["step"]) / scale
            for run, group in rule.groups.cut(bucket.parameters, rule.weight_decay, False):
                values, lr = bucket.values[run], group.lr_factor * terms["lr"]
                values -= lr * (change[run] + group.weight_decay * values)

"""DiLoCo and Streaming DiLoCo: many independent steps, then one of an outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.local_sgd import LocalSGD


class DiLoCo(LocalSGD):
    """Local SGD whose averages are the gradients of an outer optimizer, SGD with Nesterov momentum.

    Ranks step independently from the outer parameters c. Every `period` steps, with ``d = c - mean
    of w_i``: ``v <- momentum v + d``; ``c <- c - rate (d + momentum v)``; ``w_i <- c``. The
    communication volume is 1 / `period` of that of all-reduce. With rate 1 and momentum 0 this is
    `LocalSGD`. The inner optimizer, AdamW in the paper, keeps its local state.

    Means are weighted by samples, as in `LocalSGD`; between outer steps the mean of the ranks is
    evaluated and saved. A further `fit` starts from it, with the same velocity.

    Parameters
    ----------
    comm : Communicator
    period : int
        Steps from one outer step to the next; the paper's H.
    rate : float
        Learning rate of the outer optimizer.
    momentum : float
        Of the outer optimizer, in [0, 1).

    Attributes
    ----------
    outer, velocity : sequence of ndarray
        c and v of each bucket, equal on all ranks.

    References
    ----------
    Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023,
    algorithm 1.
    """

    period: int = option(50, at_least=1)
    rate: float = option(0.7, above=0)
    momentum: float = option(0.9, at_least=0, below=1)
    outer: Sequence[np.ndarray] = ()

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        self.velocity = [0 * bucket.values for bucket in buckets]
        super().start(buckets)

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, and to the outer parameters."""
        super().broadcast_parameters()
        self.outer = [bucket.values.copy() for bucket in self.buckets]

    def update(self, optimizer: Optimizer) -> None:
        super().update(optimizer)
        if optimizer.iterations % self.period == 0:
            for bucket, outer, velocity in zip(
                self.buckets, self.outer, self.velocity, strict=True
            ):
                self.outer_step(outer, velocity, outer - bucket.values, optimizer.lr_now)
                bucket.values[...] = outer

    def outer_step(
        self, outer: np.ndarray, velocity: np.ndarray, change: np.ndarray, lr: float
    ) -> None:
        """Update the outer parameters and the velocity in place by the mean change of the ranks."""
        velocity *= self.momentum
        velocity += change
        outer -= self.rate * (change + self.momentum * velocity)

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return {"outer": self.outer, "velocity": self.velocity}


class StreamingDiLoCo(DiLoCo):
    """DiLoCo bucket by bucket, each at a step of its own, while training continues.

    The outer gradient of bucket b of B is sent at steps t for which ``t + b period // B`` is a
    multiple of `period`, and arrives in the `delay` steps that follow. Ranks then take the outer
    step of the bucket, and continue from ``mixing w_i + (1 - mixing) c``. So a rank sends 1 / B of
    the parameters at a time, and waits only for messages that take longer than `delay` steps. With
    one bucket, delay 0 and mixing 0 this is `DiLoCo`, but for means, in which ranks have equal
    weights. The paper also sends outer gradients in 4 bits.

    Parameters
    ----------
    comm : Communicator
    period, rate, momentum
        See `DiLoCo`.
    delay : int
        The paper's tau, less than `period`.
    mixing : float
        The part of its own parameters that a rank keeps, in [0, 1); the paper's alpha.

    References
    ----------
    Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free
    lunch", 2025, algorithm 2.
    """

    delay: int = option(1, at_least=0)
    mixing: float = option(0.5, at_least=0, below=1)

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        if self.delay >= self.period:
            raise ValueError(
                f"StreamingDiLoCo: delay must be less than period {self.period}, got {self.delay}"
            )

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        self.changes = [0 * bucket.values for bucket in buckets]
        super().start(buckets)

    def update(self, optimizer: Optimizer) -> None:
        self.step_alone(optimizer)
        for bucket in self.buckets:
            offset = bucket.index * self.period // len(self.buckets)
            if (optimizer.iterations + offset) % self.period == 0:
                self.send(bucket)
            sent = optimizer.iterations - self.delay
            if sent > 0 and (sent + offset) % self.period == 0:
                self.merge(bucket, optimizer.lr_now)

    def send(self, bucket: Bucket) -> None:
        """Start to average the bucket's outer gradient over all ranks."""
        change = self.changes[bucket.index]
        change[...] = (self.outer[bucket.index] - bucket.values) / self.comm.size
        self.in_flight.put(bucket, self.comm.iallreduce(change))

    def merge(self, bucket: Bucket, lr: float) -> None:
        """Take the outer step of a bucket, and move the rank's parameters to the outer ones."""
        if bucket in self.in_flight:
            self.in_flight.pop(bucket).wait()
        outer, change = self.outer[bucket.index], self.changes[bucket.index]
        self.outer_step(outer, self.velocity[bucket.index], change, lr)
        bucket.values[...] = self.mixing * bucket.values + (1 - self.mixing) * outer

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return super().arrays() | {"change": self.changes}

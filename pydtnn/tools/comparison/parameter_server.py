"""A synchronous parameter server with buckets distributed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.schemes.sharded import Partition

PUSH, PULL = 0, 1
"""Tags of messages with gradients to a server, and with parameters from it."""


class ParameterServer(Partition):
    """Each bucket is served by one rank: all ranks push gradients to it and pull parameters.

    ``w_b <- U(w_b, sum_i g_ib)`` on the server of bucket b, in messages from rank to rank: P - 1
    pushes while backward runs, P - 1 pulls after the update. All ranks are workers and servers;
    each serves about 1 / P of the parameters, in whole buckets, and stores the optimizer's state
    for these only. The same result as `AllReduce` within rounding.

    `ShardedOptimizer` stores a part of every bucket on every rank instead and uses collectives:
    there a rank sends 2 (P - 1) / P of the parameters; here this is the average, but the link of a
    server transfers (P - 1) buckets at a time. Use buckets small enough that every rank serves
    several.

    References
    ----------
    Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, with the
    sequential consistency of section 3.4.
    """

    static = True

    def divide(self, bucket: Bucket, costs: Sequence[int] | None) -> list[int]:
        """Assign the bucket to the rank that serves the fewest elements so far."""
        counts = [0] * self.comm.size
        counts[int(self.loads(bucket).argmin())] = len(bucket.values)
        return counts

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        super().start(buckets)
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        self.servers = {
            bucket.index: int(np.argmax(self.counts[bucket.index])) for bucket in buckets
        }
        self.pushed = {
            bucket.index: {rank: np.empty_like(bucket.grads) for rank in others}
            for bucket in buckets
            if self.servers[bucket.index] == self.comm.rank
        }

    def bucket_ready(self, bucket: Bucket) -> None:
        """Push the bucket's gradients to its server."""
        pushed = self.pushed.get(bucket.index)  # None if another rank is the server
        sends = [(bucket.grads, self.servers[bucket.index])] if pushed is None else []
        receives = [(array, rank) for rank, array in (pushed or {}).items()]
        self.in_flight.put(bucket, self.comm.exchange(sends, receives, PUSH))

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step(self.add)
        for bucket in self.buckets:
            self.pull(bucket)
        self.in_flight.wait()

    def add(self, bucket: Bucket) -> None:
        """Wait for pushed gradients and add them to the server's own."""
        self.in_flight.pop(bucket).wait()
        for array in self.pushed.get(bucket.index, {}).values():
            bucket.grads[...] += array

    def pull(self, bucket: Bucket) -> None:
        """Start to receive the bucket's parameters from its server."""
        pushed = self.pushed.get(bucket.index)
        sends = [(bucket.values, rank) for rank in pushed or {}]
        receives = [(bucket.values, self.servers[bucket.index])] if pushed is None else []
        self.in_flight.put(bucket, self.comm.exchange(sends, receives, PULL))

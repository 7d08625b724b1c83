"""ZeRO-1: every rank stores and updates a part of the optimizer's state."""

from __future__ import annotations

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.schemes.partition import Partition


class ShardedOptimizer(Partition):
    """Synchronous data parallelism in which each rank updates its part of each bucket only.

    ``G_r = part r of sum_i g_i`` (reduce-scatter); ``w_r <- U(w_r, G_r)`` on rank r alone; all
    parts are then sent to all ranks (all-gather). The same result as `AllReduce` within rounding,
    for every rule: element-wise ones, those that need whole parameters (LARS, LAMB), and clipping
    by the global norm. An all-reduce consists of these two operations, so the volume is the same.

    Each rank stores about 1 / P of the optimizer's state: with Adam, 2 / P numbers per parameter
    instead of 2. Checkpoints contain all of it, and can be resumed on another number of ranks.

    References
    ----------
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, section 5.1 (P_os).
    """

    equal = sums_gradients = exact = static = True

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step(self.reduce)
        for bucket in self.buckets:
            own = bucket.values[self.stretch(bucket)]
            self.comm.allgather(own, self.counts[bucket.index], bucket.values)

    def reduce(self, bucket: Bucket) -> None:
        """Write the sum over all ranks to this rank's part of a bucket's gradients."""
        own = bucket.grads[self.stretch(bucket)]
        total = np.empty_like(own)
        self.sums.part(bucket, self.counts[bucket.index], total)
        own[...] = total

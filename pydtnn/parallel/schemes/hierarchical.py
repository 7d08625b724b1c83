"""All-reduce in three steps: on each host, between the hosts, on each host."""

from __future__ import annotations

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import AllReduce
from pydtnn.utils.request import Completed, Request


class Hierarchical(AllReduce):
    """Synchronous data parallelism in which one rank per host, its leader, sends to other hosts.

    ``s_h = sum of g_i on host h`` at its leader; ``s = sum_h s_h`` among the leaders; each leader
    broadcasts s on its host. The same result as `AllReduce` within rounding. The slow links between
    hosts transfer one message per host instead of one per rank, while the rest of backward runs.

    Parameters
    ----------
    comm : Communicator
    overlap : bool
        See `AllReduce`.

    References
    ----------
    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, section 4.1.
    """

    sums_gradients = exact = False  # gradients are summed on the hosts first
    static = True

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        if not self.buckets:  # the groups do not depend on the model
            self.host = self.comm.split_by_host()
            self.leads = self.host.rank == 0
            self.leaders = self.comm.split(0 if self.leads else 1)
        super().start(buckets)

    def free(self) -> None:
        if self.buckets:
            self.host.free()
            self.leaders.free()
        super().free()

    def start_sum(self, bucket: Bucket) -> Request:
        """Sum the bucket's gradients on the host, and start the sum between leaders."""
        counts = [len(bucket.grads)] + [0] * (self.host.size - 1)
        total = np.empty_like(bucket.grads[: counts[self.host.rank]])
        self.host.reduce_scatter(bucket.grads, counts, total)
        if not self.leads:
            return Completed()
        bucket.grads[...] = total
        return self.leaders.iallreduce(bucket.grads)

    def wait(self, bucket: Bucket) -> None:
        super().wait(bucket)
        self.host.broadcast(bucket.grads)

"""Stale synchronous parallel: a rank waits only for updates that are older than a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option
from pydtnn.utils.request import Chain, Completed, Request


class StaleSynchronous(GradientExchange):
    """Ranks send their updates to all others, which apply them `staleness` steps later.

    ``w_i(t + 1) = w_i(t) + d_i(t) + sum of d_j(t - s) over the other ranks j``, with s =
    `staleness` and ``d_i = (U(w_i, g_i(w_i)) - w_i) / P``: each rank has a copy of the table of a
    parameter server, sees its own updates at once, and all others up to step t - s. A rank may so
    be s steps ahead of the slowest before it waits. The paper permits newer updates to be used;
    without them, results do not depend on which rank is faster. With s = 0 and an optimizer that is
    linear in the gradients this is plain SGD.

    Gradients are weighted as in `Gossip`. The mean of the ranks is evaluated and saved, without the
    updates of others that a rank has not applied. The optimizer's state is local.

    Parameters
    ----------
    comm : Communicator
    staleness : int
        s, in steps.

    References
    ----------
    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013, section 3.
    """

    staleness: int = option(2, at_least=0)

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, without updates that they have not applied."""
        self.in_flight.wait()
        super().broadcast_parameters()
        self.late = [(self.zeros(), cast(Request, Completed())) for _ in range(self.staleness)]

    def zeros(self) -> list[np.ndarray]:
        """Return new arrays of zeros, as long as the buckets."""
        return [0 * bucket.values for bucket in self.buckets]

    def loss_scale(self, local: int, total: int) -> float:
        return self.comm.size / total

    def update(self, optimizer: Optimizer) -> None:
        tag = optimizer.iterations % (self.staleness + 1)
        others = [(self.comm.rank + hop) % self.comm.size for hop in range(1, self.comm.size)]
        before = [bucket.values.copy() for bucket in self.buckets]
        optimizer.step()
        totals = self.zeros()
        self.late.append((totals, Chain(self.receive(totals, others, tag))))
        self.in_flight.add(self.late[-1][1])
        for bucket, old in zip(self.buckets, before, strict=True):
            change = (bucket.values - old) / self.comm.size
            bucket.values[...] = old + change
            for other in others:
                self.in_flight.add(self.comm.isend(change, other, tag))
        totals, received = self.late.pop(0)
        received.wait()
        for bucket, change in zip(self.buckets, totals, strict=True):
            bucket.values += change
        self.samples = 1  # equal weights when parameters are averaged for evaluation

    def receive(
        self, totals: Sequence[np.ndarray], others: Sequence[int], tag: int
    ) -> Iterator[Request]:
        """Add up the updates of other ranks in a step."""
        for total in totals:
            part = np.empty_like(total)
            for other in others:
                yield self.comm.irecv(part, other, tag)
                total += part

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return {f"late{age}": totals for age, (totals, _) in enumerate(self.late)}

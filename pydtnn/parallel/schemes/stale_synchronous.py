"""Stale synchronous parallel: a rank waits only for updates that are older than a bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option


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
    owed: int = 0  # updates that each other rank has sent since

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, without updates that they have not applied."""
        self.drain()
        super().broadcast_parameters()
        self.late = [[0 * b.values for b in self.buckets] for _ in range(self.staleness)]

    def loss_scale(self, local: int, total: int) -> float:
        return self.comm.size / total

    def update(self, optimizer: Optimizer) -> None:
        before = [bucket.values.copy() for bucket in self.buckets]
        optimizer.step()
        for bucket, old in zip(self.buckets, before, strict=True):
            change = (bucket.values - old) / self.comm.size
            bucket.values[...] = old + change
            for hop in range(1, self.comm.size):
                self._pending.add(self.comm.isend(change, (self.comm.rank + hop) % self.comm.size))
        self.owed += 1
        if not self.late:
            self.receive()
        for bucket, change in zip(self.buckets, self.late.pop(0), strict=True):
            bucket.values += change
        self.samples = 1  # equal weights when parameters are averaged for evaluation

    def receive(self) -> None:
        """Wait for the next update of all other ranks."""
        self.late.append([0 * bucket.values for bucket in self.buckets])
        for total in self.late[-1]:
            part = np.empty_like(total)
            for hop in range(1, self.comm.size):
                self.comm.recv(part, (self.comm.rank + hop) % self.comm.size)
                total += part
        self.owed -= 1

    def drain(self) -> None:
        """Receive what all ranks, which are at the same step, have sent."""
        while self.owed:
            self.receive()
        super().drain()

    def average_parameters(self) -> None:
        """Average the parameters of all ranks, without updates that they have not applied."""
        self.drain()
        super().average_parameters()

    def arrays(self) -> dict[str, Sequence[np.ndarray]]:
        return {f"late{age}": update for age, update in enumerate(self.late)}

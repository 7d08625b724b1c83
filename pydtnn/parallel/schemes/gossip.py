"""Decentralised averaging over the neighbours in a communication graph."""

from __future__ import annotations

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.graphs import GRAPHS, swap


class Gossip(GradientExchange):
    """Ranks step independently, then average their parameters with those of their neighbours.

    ``w_i <- sum_j W_ij U(w_j, g_j(w_j))`` with a doubly stochastic W: 1 / (neighbours + 1) for each
    rank that sends to i, and i itself. The mean of all ranks therefore moves by the mean of their
    steps, and differences between ranks shrink by the second eigenvalue of W per step (with
    "one_peer", per round). A rank sends its parameters only to its neighbours, for any number of
    ranks: there is no global synchronization.

    Each rank's gradient is weighted by its samples (P times its share), so that the mean over ranks
    is the mean over samples for uneven batches, too: with the complete graph (so with 2 ranks) and
    an optimizer that is linear in the gradients (SGD, momentum, decay) this is plain SGD. The
    optimizer's state is local.

    Parameters
    ----------
    comm : Communicator
    graph : {"ring", "exponential", "one_peer", "complete"}
        See `pydtnn.parallel.schemes.graphs`.

    References
    ----------
    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS 2017,
    algorithm 1; Assran et al., "Stochastic gradient push", ICML 2019, which steps before it
    averages, as we do; Ying et al., "Exponential graph is provably efficient for decentralized deep
    training", NeurIPS 2021.
    """

    graph: str = option("ring", among=GRAPHS)

    def loss_scale(self, local: int, total: int) -> float:
        return self.comm.size / total

    def update(self, optimizer: Optimizer) -> None:
        hops = GRAPHS[self.graph](self.comm.size, optimizer.iterations)
        optimizer.step()
        for bucket, received in swap(self.comm, self.buckets, hops):
            bucket.values[...] = sum(received, bucket.values) / (1 + len(received))
        self.samples = 1  # equal weights when parameters are averaged for evaluation

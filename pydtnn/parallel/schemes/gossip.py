"""Decentralised averaging over the neighbours in a communication graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option

# Communication graphs of decentralised schemes, in which all ranks have equal roles.
#
# A graph is a function of the number of ranks and the step that returns hops: rank r sends to rank
# r + hop. Each rank then computes the mean of its own and the received values: a circulant matrix
# with equal weights, with rows and columns that sum to 1. The mean over all ranks is preserved
# exactly.

Topology = Callable[[int, int], Sequence[int]]


def ring(size: int, step: int) -> list[int]:
    """Send to both neighbours.

    >>> ring(5, 0), ring(2, 0), ring(1, 0)
    ([1, 4], [1], [])
    """
    return sorted({1, size - 1} - {0, size})


def exponential(size: int, step: int) -> list[int]:
    """Send to the ranks at distances 1, 2, 4, 8, ... (Ying et al. 2021, section 3).

    >>> exponential(6, 0), exponential(1, 0)
    ([1, 2, 4], [])
    """
    return [1 << k for k in range((size - 1).bit_length())]


def one_peer(size: int, step: int) -> list[int]:
    """Send to one rank per step: those of `exponential` in turn.

    If P is a power of 2, log2(P) steps compute an exact average (Assran et al. 2019, appendix A;
    Ying et al. 2021, section 4).

    >>> [one_peer(6, step) for step in range(4)]
    [[1], [2], [4], [1]]
    """
    hops = exponential(size, step)
    return [hops[step % len(hops)]] if hops else []


def complete(size: int, step: int) -> list[int]:
    """Send to all ranks: one step computes an exact average, at the highest cost."""
    return list(range(1, size))


GRAPHS: dict[str, Topology] = {
    "ring": ring,
    "exponential": exponential,
    "one_peer": one_peer,
    "complete": complete,
}
"""Graphs by name."""


def swap(
    comm: Communicator, buckets: Sequence[Bucket], hops: Sequence[int]
) -> Iterator[tuple[Bucket, list[np.ndarray]]]:
    """Send all parameters along the hops; yield each bucket with the received values.

    Collective: all ranks call it. A bucket's values may be modified once it is yielded.
    """
    received = [[np.empty_like(bucket.values) for _ in hops] for bucket in buckets]
    sources, targets = ([(comm.rank + sign * hop) % comm.size for hop in hops] for sign in (-1, 1))
    requests = [
        comm.exchange(
            [(bucket.values, to) for to in targets], list(zip(arrays, sources, strict=True))
        )
        for bucket, arrays in zip(buckets, received, strict=True)
    ]
    for bucket, arrays, request in zip(buckets, received, requests, strict=True):
        request.wait()
        yield bucket, arrays


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
        See `pydtnn.parallel.schemes.gossip`.

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

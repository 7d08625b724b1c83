"""Stochastic gradient push: averages along directed graphs in which ranks have unequal parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.gossip import GRAPHS


def targets(graph: str, size: int, step: int) -> list[list[int]]:
    """Return the ranks to which each rank sends: in graph "random" one, drawn for each step.

    >>> targets("ring", 3, 0)
    [[1, 2], [2, 0], [0, 1]]
    """
    if graph == "random":
        drawn = np.random.default_rng(step).integers(1, max(size, 2), size)
        return [[(rank + int(hop)) % size] * (size > 1) for rank, hop in enumerate(drawn)]
    hops = GRAPHS[graph](size, step)
    return [[(rank + hop) % size for hop in hops] for rank in range(size)]


class GradientPush(GradientExchange):
    """Ranks step independently, then push equal parts of their parameters and weight to others.

    ``x_i <- U(x_i, g_i(x_i / a_i))``; rank i of n_i targets sends x_i / (n_i + 1) and a_i /
    (n_i + 1) to each of them, and adds what it receives to its own part; gradients are computed at
    ``x_i / a_i``, where a_i, at first 1, is the weight of rank i. No rank needs to know who sends
    to whom but its own sources, and graphs need not be symmetric or regular: the sums of all x_i
    and a_i stay. In the graphs of `Gossip`, which are regular, all weights are 1.

    Gradients are weighted as in `Gossip`; evaluated is the sum of all x_i over the sum of all a_i.
    The optimizer's state is local.

    Parameters
    ----------
    comm : Communicator
    graph : {"random", "ring", "exponential", "one_peer", "complete"}
        In "random", each rank sends to one other, drawn anew for each step.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat, "Stochastic gradient push for distributed deep learning",
    ICML 2019, algorithm 1.
    """

    graph: str = option("random", among=("random", *GRAPHS))
    weight: float = 1.0

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks, with equal weights."""
        super().broadcast_parameters()
        self.weight = 1.0

    def loss_scale(self, local: int, total: int) -> float:
        return self.comm.size / total

    def update(self, optimizer: Optimizer) -> None:
        sent_to = targets(self.graph, self.comm.size, optimizer.iterations)
        for bucket in self.buckets:
            bucket.values *= self.weight
        optimizer.step()
        weight = np.array([self.weight])
        for array in (weight, *(bucket.values for bucket in self.buckets)):
            array /= 1 + len(sent_to[self.comm.rank])
            sources = [rank for rank, to in enumerate(sent_to) if self.comm.rank in to]
            received = [(np.empty_like(array), source) for source in sources]
            sends = [(array, to) for to in sent_to[self.comm.rank]]
            self.comm.exchange(sends, received).wait()
            array += sum(part for part, _ in received)
        self.weight = float(weight[0])
        for bucket in self.buckets:
            bucket.values /= self.weight

    def average_parameters(self) -> None:
        """Average the parameters of all ranks, weighted by their weights."""
        self.samples = self.weight
        super().average_parameters()

    def state(self) -> dict[str, Any]:
        return super().state() | {"weight": self.weight}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.weight = float(state["weight"])

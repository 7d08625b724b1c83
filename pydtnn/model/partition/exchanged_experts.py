"""Experts that are divided over ranks, to which tokens travel and from which results return."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Steps
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.experts import Experts, Routes
from pydtnn.layers.parameters import Cut
from pydtnn.utils.split import even_cuts


class ExchangedExperts(Communicating, Experts):
    """Own experts, for the tokens of all ranks; ranks have other samples.

    Each rank sends to each other rank how many rows it has for each of its experts, and then the
    rows; results, and gradients of both, travel in the same way. Rows of an expert are in the order
    of the samples of the whole batch, as on one rank. Capacities and losses are those of samples,
    so that they need no other numbers.

    Parameters
    ----------
    experts : Experts
        Of the whole network, bound.
    cut : Cut
        Experts of the ranks.

    Notes
    -----
    Inputs ``(n, T, D)`` and ``(n, T, E)``, and output ``(n, T, D)``, of own samples n.

    References
    ----------
    Lepikhin et al., "GShard: Scaling giant models with conditional computation and automatic
    sharding", ICLR 2021, section 3.2.
    """

    def __init__(self, experts: Experts, cut: Cut) -> None:
        super().__init__(
            experts.hidden,
            choices=experts.choices,
            capacity=experts.capacity,
            gated=experts.gated,
            balance=experts.balance,
            z=experts.z,
            initializer=experts.initializer,
            last_initializer=experts.last_initializer,
            name=experts.name,
        )
        self.source, self.cut = experts.source, cut

    def build(self, *shapes: Shape) -> Shape:
        """Find the place of this rank."""
        assert self.mesh is not None
        self.place = self.mesh.position[self.cut.axis]
        return super().build(*shapes)

    def own_experts(self) -> int:
        """Return the number of experts of this rank."""
        return self.cut.bounds[self.place + 1] - self.cut.bounds[self.place]

    def expected_rows(self, tokens: int) -> int:
        """Return the rows of all ranks, which have so many tokens each, for own experts."""
        ranks = len(self.cut.bounds) - 1
        return super().expected_rows(ranks * tokens) * self.own_experts() // self.experts

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Compute the output with the experts of all ranks."""
        x, logits = xs
        routes = self.route(logits, context)
        value, shares = self.penalty(routes, len(x), context)
        counts, value = yield from self._exchange_counts(routes, value, context)
        sent = [int(routes.counts[a:b].sum()) for a, b in pairwise(self.cut.bounds)]
        received = counts.sum(axis=1).tolist()
        experts = np.tile(np.arange(counts.shape[1]), len(counts)).repeat(counts.ravel())
        order = self.backend.asarray(np.argsort(experts, kind="stable"))  # of rows by rank
        rows = yield from self._exchange(self.rows_of(x, routes), sent, received)
        results, kept = self.compute(rows[order], counts.sum(axis=0))
        rows[order] = results
        results = yield from self._exchange(rows, received, sent)
        y, own = self.combine(results, routes, x)
        penalties = self.penalise(value, shares, context)
        return y, (routes, kept, own, penalties, (sent, received, order))

    def backward_steps(self, dy: Array, saved: Saved, *, joint: bool) -> Steps:
        """Compute the gradients of rows, experts, weights and logits."""
        routes, kept, own, penalties, (sent, received, order) = saved
        dresults, dlogits = self.split(dy, own, routes, penalties)
        drows = yield from self._exchange(dresults, sent, received)
        dxs = self.compute_backward(drows[order], kept)
        drows[order] = dxs
        dxs = yield from self._exchange(drows, received, sent)
        return self.join(dxs, routes, dy), dlogits

    def _exchange_counts(self, routes: Routes, value: Number, context: StepContext) -> Steps:
        """Return the rows (P, own experts) of each rank for own experts, and the sum of losses."""
        backend, bounds, own = self.backend, self.cut.bounds, self.own_experts()
        ranks = len(bounds) - 1
        sends, receives = [], backend.empty((ranks, own + 1), "float64")
        for r, (first, last) in enumerate(pairwise(bounds)):
            numbers = backend.empty((last - first + 1,), "float64")
            numbers[:-1] = backend.asarray(routes.counts[first:last])
            numbers[-1] = value
            if r == self.place:
                receives[r] = numbers
            else:
                sends.append((numbers, r))
        others = [(receives[r], r) for r in range(ranks) if r != self.place]
        (yield Messages(sends, others, self.cut.axis)).wait()
        if backend.has_values:
            received = backend.to_numpy(receives)
            return received[:, :-1].astype(int), received[:, -1].sum()
        one = self.route(backend.empty((1, *self.input_shapes[1]), self.dtype), context).counts
        mine = one[bounds[self.place] : bounds[self.place + 1]]
        samples = np.diff(even_cuts(context.batch, ranks))
        return samples[:, None] * mine, 0.0

    def _exchange(self, rows: Array, sent: Sequence[int], received: Sequence[int]) -> Steps:
        """Send consecutive rows to each rank; return those of all ranks, in their order.

        Parameters
        ----------
        rows : Array, shape (R, D)
        sent, received : sequence of int
            Rows to and from each rank, this one included.
        """
        result = self.backend.empty((sum(received), rows.shape[1]), rows.dtype)
        to, source = (list(pairwise([0, *np.cumsum(n).tolist()])) for n in (sent, received))
        own, others = self.place, range(len(sent))
        sends = [(rows[slice(*to[r])], r) for r in others if r != own and sent[r]]
        receives = [(result[slice(*source[r])], r) for r in others if r != own and received[r]]
        pending = yield Messages(sends, receives, self.cut.axis)
        result[slice(*source[own])] = rows[slice(*to[own])]
        pending.wait()
        return result

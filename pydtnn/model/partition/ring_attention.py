"""Attention of positions that are cut over ranks, whose keys and values travel around a ring."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels.reference.attention import At
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.attention import DotProductAttention
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.masks import positions_seen
from pydtnn.layers.parameters import Cut

Result = tuple[Array, Array]
"""Outputs (N, n, D) of some queries, and logarithms of their sums of exponentials (N, H, n)."""


class RingAttention(Communicating, DotProductAttention):
    """Attention of own positions, with the keys and values of all ranks, one after the other.

    A rank computes with the keys and values that it has while it sends them to the next rank and
    receives those of the rank before. Results with several blocks of keys are combined by the
    logarithms of their sums of exponentials. In backward, the gradients of keys and values follow
    their block around the ring, back to its rank.

    Causal queries see the more keys the later they are. Therefore ranks r and P - 1 - r compute the
    second half of each other's queries, so that all have equal work.

    Parameters
    ----------
    attention : DotProductAttention
        Not bound yet.
    cut : Cut
        Positions of the ranks.

    Notes
    -----
    Input ``(N, t, 3 D)`` and output ``(N, t, D)`` of own positions t.

    References
    ----------
    Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023.
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """

    supports = ()  # results with several blocks are rounded once

    def __init__(self, attention: DotProductAttention, cut: Cut) -> None:
        names = "causal", "window", "positions", "scale", "dropout"
        options: dict[str, Any] = {name: getattr(attention, name) for name in names}
        super().__init__(attention.heads, name=attention.name, **options)
        self.all_heads, self.first_head, self.cut = attention.all_heads, attention.first_head, cut

    def build(self, *shapes: Shape) -> Shape:
        """Find the queries that this rank computes: of own ones, and of a partner."""
        shape = super().build(*shapes)
        assert self.mesh is not None
        self.place, self.ranks = self.mesh.position[self.cut.axis], self.mesh.shape[self.cut.axis]
        self.partner = self.ranks - 1 - self.place if self.causal else self.place
        (first, middle, last), (_, start, stop) = map(self._halves, (self.place, self.partner))
        self.half, self.rest = middle - first, last - middle
        self.pieces = (first, middle), (start, stop)
        length = self.cut.bounds[-1]
        self.all_seen = positions_seen(length, length, self.causal, self.window)[0]
        return shape

    def _halves(self, place: int) -> tuple[int, int, int]:
        """Return the bounds of the halves of a rank's queries; the second is for causal ones."""
        first, last = self.cut.bounds[place : place + 2]
        return first, (first + last + 1) // 2 if self.causal else last, last

    def _blocks(self, place: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the pieces that see keys of a rank, and arguments of kernels for each."""
        first, last = self.cut.bounds[place : place + 2]
        blocks: list[tuple[int, dict[str, Any]]] = []
        for i, (start, stop) in enumerate(self.pieces):
            seen = (self.all_seen[start:stop] - first).clip(0, last - first)
            some = seen[:, 0] < seen[:, 1]
            if not some.any():
                continue
            every = (seen == [0, last - first]).all()
            intervals = None if every else self.backend.asarray(seen[None], np.dtype("int64"))
            place_of = At(start, first, self.cut.bounds[-1])
            blocks.append((i, {"at": place_of, "seen": intervals, "scale": self.scale}))
        return blocks

    def _swap(self, own: Array, positions: int) -> Steps:
        """Send an array (N, n, D) to the partner, and receive one of other positions from it."""
        alone, shape = self.partner == self.place, (len(own), positions, own.shape[2])
        received = own if alone else self.backend.empty(shape, own.dtype)
        sends = [(own, self.partner)] if own.size and not alone else []
        receives = [(received, self.partner)] if received.size and not alone else []
        pending = None
        if self.causal:  # the same collectives on all ranks
            pending = yield Messages(sends, receives, self.cut.axis)

        def finish() -> Array:
            if pending is not None:
                pending.wait()
            return received

        return Pending(None, finish)

    def _pass_on(self, array: Array, place: int) -> Steps:
        """Send keys and values to the next rank, and receive those of the rank before `place`."""
        before, after = (self.place - 1) % self.ranks, (self.place + 1) % self.ranks
        first, last = self.cut.bounds[(place - 1) % self.ranks :][:2]
        received = self.backend.empty((len(array), last - first, array.shape[2]), array.dtype)
        return (yield Messages([(array, after)], [(received, before)], self.cut.axis))

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Compute the output while keys and values travel."""
        (x,) = xs
        features, (start, stop) = self.output_shape[1], self.pieces[1]
        queries, kv = [x[:, : self.half, :features].copy()], x[:, :, features:].copy()
        arriving = yield from self._swap(x[:, self.half :, :features].copy(), stop - start)
        results: list[Result | None] = [None, None]
        dropout = self._dropped(context)
        added = {} if self.positions is None else self.positions.added(self)
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            for i, where in self._blocks(place):
                query = arriving.wait() if i else queries[0]
                y = self.backend.empty(query.shape, query.dtype)
                sums = self.backend.empty((len(x), self.heads, query.shape[1]), query.dtype)
                options: dict[str, Any] = {"kv": kv, "dropout": dropout, **added, **where}
                self.backend.attention.forward(query, self.heads, out=y, log_sums=sums, **options)
                results[i] = self._combined(results[i], (y, sums))
            if moving is not None:
                (kv,) = moving.wait()
        queries.append(arriving.wait())
        nothing = queries[1], self.backend.empty((len(x), self.heads, 0), x.dtype)
        assert results[0] is not None  # own queries see own keys
        (y, sums), others = results[0], results[1] or nothing
        arriving = yield from self._swap(others[0], self.rest)
        y = self.xp.concatenate([y, arriving.wait()], axis=1) if self.causal else y
        return y, (x, y, sums, queries[1], others, dropout, added)

    def _combined(self, one: Result | None, other: Result) -> Result:
        """Return the result with the keys of two blocks."""
        if one is None:
            return other
        sums = self.xp.logaddexp(one[1], other[1])
        whole = self.xp.where(sums == -self.xp.inf, 0, sums)  # where no key is seen
        for y, own in (one, other):
            share = self.xp.exp(own - whole).transpose(0, 2, 1)[..., None]  # (N, n, H, 1)
            heads = y.reshape(*y.shape[:2], self.heads, y.shape[2] // self.heads)
            self.xp.multiply(heads, share, out=heads)
        return self.xp.add(one[0], other[0], out=one[0]), sums

    def backward_steps(self, dy: Array, saved: Saved, *, joint: bool) -> Steps:
        """Compute dx while keys, values and their gradients travel."""
        x, y, sums, query, others, dropout, added = saved
        features, (start, stop) = self.output_shape[1], self.pieces[1]
        arriving = yield from self._swap(dy[:, self.half :].copy(), stop - start)
        own = x[:, : self.half, :features].copy(), y[:, : self.half].copy(), sums
        operands, dys = (own, (query, *others)), [dy[:, : self.half].copy()]
        dqs = [self.backend.zeros(part[0].shape, dy.dtype) for part in operands]
        kv = x[:, :, features:].copy()
        sent: Any = None
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            dkv = self.backend.zeros(kv.shape, dy.dtype)
            for i, where in self._blocks(place):
                q, of, log_sums = operands[i]
                dq, term = (self.backend.empty(part.shape, dy.dtype) for part in (q, kv))
                options: dict[str, Any] = {"kv": kv, "dropout": dropout, **added, **where}
                self.backend.attention.backward(
                    *(arriving.wait() if i else dys[0], q, of, log_sums, self.heads),
                    **{"out": dq, "out_kv": term, **options},
                )
                self.xp.add(dqs[i], dq, out=dqs[i])
                self.xp.add(dkv, term, out=dkv)
            if sent is not None:
                (before,) = sent.wait()
                self.xp.add(dkv, before, out=dkv)
            sent = yield from self._pass_on(dkv, place)
            if moving is not None:
                (kv,) = moving.wait()
        arriving.wait()
        arriving = yield from self._swap(dqs[1], self.rest)
        dx = self.empty(len(x), self.input_shapes[0])
        dx[:, : self.half, :features] = dqs[0]
        if self.causal:
            dx[:, self.half :, :features] = arriving.wait()
        (dx[:, :, features:],) = sent.wait()
        return dx

    def pairs(self) -> int:
        """Count the pairs of a query and a key that this rank computes."""
        seen = self.all_seen[:, 1] - self.all_seen[:, 0]
        return int(sum(seen[start:stop].sum() for start, stop in self.pieces))

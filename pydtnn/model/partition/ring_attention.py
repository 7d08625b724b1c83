"""Attention of positions that are cut over ranks, whose keys and values travel around a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pydtnn.kernels.reference.attention import At
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.attention import CrossAttention, DotProductAttention
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.masks import both, positions_seen
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
    second half of each other's queries, so that all have equal work; unless the largest work of a
    rank is as small without this, as with a window. Blocks of keys that no query sees are not
    multiplied. Lengths and documents, which differ between samples, are not balanced.

    Parameters
    ----------
    attention : DotProductAttention
        Not bound yet.
    cut : Cut
        Positions of the ranks, of queries.
    keys : Cut, optional
        Those of keys, if they are of another sequence.

    Notes
    -----
    Input ``(N, t, 3 D)`` and output ``(N, t, D)`` of own positions t. Lengths ``(N, 1)`` or
    documents ``(N, T)`` are those of whole sequences. `RelativePositions` has ``H t T`` numbers on
    a rank.

    References
    ----------
    Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023.
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """

    supports = ()  # results with several blocks are rounded once

    arrays = 1  # inputs that contain queries, keys and values

    def __init__(self, attention: DotProductAttention, cut: Cut, keys: Cut | None = None) -> None:
        names = "causal", "window", "positions", "scale", "dropout"
        options: dict[str, Any] = {name: getattr(attention, name) for name in names}
        super().__init__(attention.heads, name=attention.name, **options)
        self.all_heads, self.first_head, self.cut = attention.all_heads, attention.first_head, cut
        self.keys = keys or cut

    def sequence(self, shapes: tuple[Shape, ...]) -> Shape:
        """Return the shape of own positions; lengths or documents are of all."""
        return shapes[0]

    def _prepared(self, queries: int, keys: int, features: int) -> Shape:
        """Find the queries that this rank computes: of own ones, and of a partner."""
        assert self.mesh is not None
        self.stream = stream(str(self.name))
        self.place, self.ranks = self.mesh.position[self.cut.axis], self.mesh.shape[self.cut.axis]
        self.all_positions = self.cut.bounds[-1], self.keys.bounds[-1]
        self.all_seen = positions_seen(*self.all_positions, self.causal, self.window)
        alone, halves = (self._largest_work(halves) for halves in (False, True))
        self.halves = halves < alone
        self.partner = self.ranks - 1 - self.place if self.halves else self.place
        self.pieces = self._pieces(self.place, self.halves)
        self.half = self.pieces[0][1] - self.pieces[0][0]
        self.rest = queries - self.half
        self.pairs_seen = self._work(self.pieces)
        if self.positions is not None:
            own = np.concatenate([np.arange(*piece) for piece in self.pieces])
            self.positions.declare(self, own, np.arange(self.all_positions[1]))
        return queries, features

    def _pieces(self, place: int, halves: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the bounds of a rank's own queries, and of those of its partner that it takes."""
        first, last = self.cut.bounds[place : place + 2]
        if not halves:
            return (first, last), (last, last)
        start, stop = self.cut.bounds[self.ranks - 1 - place :][:2]
        return (first, (first + last + 1) // 2), ((start + stop + 1) // 2, stop)

    def _work(self, pieces: tuple[tuple[int, int], tuple[int, int]]) -> int:
        """Count the pairs of a query of pieces and a key that it sees."""
        seen = self.all_seen[0, :, 1] - self.all_seen[0, :, 0]
        return int(sum(seen[start:stop].sum() for start, stop in pieces))

    def _largest_work(self, halves: bool) -> int:
        return max(self._work(self._pieces(place, halves)) for place in range(self.ranks))

    def _blocks(
        self, place: int, exist: Array | None, bias: Array | None
    ) -> Iterator[tuple[int, tuple[slice, slice], dict[str, Any]]]:
        """Yield the pieces that see keys of a rank, places in the bias, and arguments of kernels.

        With the intervals of keys that exist in each sample, if they differ.
        """
        first, last = self.keys.bounds[place : place + 2]
        for i, (start, stop) in enumerate(self.pieces):
            static = (self.all_seen[:, start:stop] - first).clip(0, last - first)
            every = (static == [0, last - first]).all()
            seen = None if every else self.backend.asarray(static, np.dtype("int64"))
            if not _some(static):
                continue
            if exist is not None:
                own: Any = (exist[:, start:stop] - first).clip(0, last - first)
                seen = own = both(self.xp, seen, own)
                if self.backend.has_values and not _some(own):
                    continue
            rows, columns = slice(self.half * i, self.half * i + stop - start), slice(first, last)
            arguments: dict[str, Any] = {
                "at": At(start, first, max(self.all_positions)),
                "seen": seen,
            }
            if bias is not None:
                arguments["bias"] = self.xp.ascontiguousarray(bias[:, rows, columns])
            yield i, (rows, columns), arguments

    def _swap(self, own: Array, positions: int) -> Steps:
        """Send an array (N, n, D) to the partner, and receive one of other positions from it."""
        alone, shape = self.partner == self.place, (len(own), positions, own.shape[2])
        received = own if alone else self.backend.empty(shape, own.dtype)
        sends = [(own, self.partner)] if own.size and not alone else []
        receives = [(received, self.partner)] if received.size and not alone else []
        pending = None
        if self.halves:  # the same collectives on all ranks
            pending = yield Messages(sends, receives, self.cut.axis)

        def finish() -> Array:
            if pending is not None:
                pending.wait()
            return received

        return Pending(None, finish)

    def _pass_on(self, array: Array, place: int) -> Steps:
        """Send keys and values to the next rank, and receive those of the rank before `place`."""
        before, after = (self.place - 1) % self.ranks, (self.place + 1) % self.ranks
        first, last = self.keys.bounds[(place - 1) % self.ranks :][:2]
        received = self.backend.empty((len(array), last - first, array.shape[2]), array.dtype)
        return (yield Messages([(array, after)], [(received, before)], self.cut.axis))

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Compute the output while keys and values travel."""
        (q, memory), others, (start, stop) = self._operands(xs), xs[self.arrays :], self.pieces[1]
        queries, kv = [q[:, : self.half].copy()], memory.copy()
        arriving = yield from self._swap(q[:, self.half :].copy(), stop - start)
        results: list[Result | None] = [None, None]
        exist = self._exist(others[0], context) if others else None
        options: dict[str, Any] = {
            **{"scale": self.scale, "dropout": self._dropped(context)},
            **({} if self.positions is None else self.positions.added(self)),
        }
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            for i, _, where in self._blocks(place, exist, options.get("bias")):
                query = arriving.wait() if i else queries[0]
                y, sums = self._nothing(query)
                given = {"kv": kv, **options, **where}
                self.backend.attention.forward(query, self.heads, out=y, log_sums=sums, **given)
                results[i] = self._combined(results[i], (y, sums))
            if moving is not None:
                (kv,) = moving.wait()
        queries.append(arriving.wait())
        (y, sums), taken = (
            result or self._nothing(query) for result, query in zip(results, queries, strict=True)
        )
        arriving = yield from self._swap(taken[0], self.rest)
        y = self.xp.concatenate([y, arriving.wait()], axis=1) if self.halves else y
        return y, (q, memory, y, sums, queries[1], taken, exist, options)

    def _nothing(self, query: Array) -> Result:
        """Return the result of queries that see no key."""
        sums = self.backend.empty((len(query), self.heads, query.shape[1]), query.dtype)
        sums[...] = -self.xp.inf
        return self.backend.zeros(query.shape, query.dtype), sums

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
        queries, memory, y, sums, query, taken, exist, options = saved
        start, stop = self.pieces[1]
        table = None if self.positions is None else self.positions.gradient(self, options)
        if table is not None:
            table[...] = 0  # of pairs that are not multiplied
        arriving = yield from self._swap(dy[:, self.half :].copy(), stop - start)
        own = queries[:, : self.half].copy(), y[:, : self.half].copy(), sums
        operands, dys = (own, (query, *taken)), [dy[:, : self.half].copy()]
        dqs = [self.backend.zeros(part[0].shape, dy.dtype) for part in operands]
        kv = memory.copy()
        sent: Any = None
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            dkv = self.backend.zeros(kv.shape, dy.dtype)
            for i, pairs, where in self._blocks(place, exist, options.get("bias")):
                q, of, log_sums = operands[i]
                dq, term = (self.backend.empty(part.shape, dy.dtype) for part in (q, kv))
                d_bias = None if table is None else self.xp.empty_like(where["bias"])
                given = {"kv": kv, "out_kv": term, "out_bias": d_bias, **options, **where}
                self.backend.attention.backward(
                    *(arriving.wait() if i else dys[0], q, of, log_sums, self.heads),
                    **{"out": dq, **given},
                )
                if table is not None:
                    table[:, *pairs] = d_bias
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
        if self.positions is not None:
            self.positions.accumulate(self, table)
        gradients = [self.empty(len(dy), shape) for shape in self.input_shapes[: self.arrays]]
        d_queries, d_memory = self._operands(gradients)
        d_queries[:, : self.half] = dqs[0]
        if self.halves:
            d_queries[:, self.half :] = arriving.wait()
        (d_memory[...],) = sent.wait()
        shapes = self.input_shapes[self.arrays :]
        gradients += [self.backend.zeros((len(dy), *shape), self.dtype) for shape in shapes]
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    def _operands(self, xs: Sequence[Array]) -> tuple[Array, Array]:
        """Return views of queries, and of keys and values."""
        features = self.output_shape[1]
        return xs[0][:, :, :features], xs[0][:, :, features:]


def _some(seen: Array) -> bool:
    """Return whether a query sees a key."""
    return bool((seen[..., 0] < seen[..., 1]).any())


class RingCrossAttention(RingAttention, CrossAttention):
    """Attention of own positions to those of another sequence, which travel around the ring.

    Parameters are those of `RingAttention`.

    Notes
    -----
    Inputs ``(N, t1, D)`` and ``(N, t2, 2 D)``, and the lengths of the second sequences if any.
    """

    arrays = 2

    def _operands(self, xs: Sequence[Array]) -> tuple[Array, Array]:
        """Return the first two arrays."""
        return xs[0], xs[1]

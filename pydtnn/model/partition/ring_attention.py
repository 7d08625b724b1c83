"""Attention of positions that are cut over ranks, whose keys and values travel around a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
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

GAIN = 0.1  # of the largest work of a rank, for which queries move to other ranks

Piece = tuple[int, int, int, int]
"""The rank of some queries, the one that computes them, their first position, and the next ones."""

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
    multiplied. With lengths and documents, the work of each query is known when a pass begins:
    ranks compute consecutive queries of equal work in all samples together, if that makes the
    largest work smaller by a share of `GAIN`, unless there are `RelativePositions`.

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
        seen = self.all_seen[0, :, 1] - self.all_seen[0, :, 0]
        alone, halves = (self._static(halves) for halves in (False, True))
        self.usual = min(alone, halves, key=lambda pieces: max(self.work(pieces, seen)))
        self.pairs_seen = self.work(self.usual, seen)[self.place]
        if self.positions is not None:
            own = [np.arange(*piece) for _, rank, *piece in self.usual if rank == self.place]
            self.positions.declare(self, np.concatenate(own), np.arange(self.all_positions[1]))
        return queries, features

    def _static(self, halves: bool) -> list[Piece]:
        """Return the queries that ranks compute: their own, or half of them and of a partner's."""
        bounds, ranks = [*pairwise(self.cut.bounds)], range(self.ranks)
        ends = [(first + last + 1) // 2 if halves else last for first, last in bounds]
        own = [(r, r, bounds[r][0], ends[r]) for r in ranks]
        others = [(r, self.ranks - 1 - r, ends[r], bounds[r][1]) for r in ranks]
        return own + [piece for piece in others if piece[2] < piece[3]]

    def balanced(self, exist: Array) -> list[Piece]:
        """Return the queries that ranks compute if these keys exist, the same on all of them."""
        seen: Any = both(np, self.all_seen, self.backend.to_numpy(exist))
        work = (seen[..., 1] - seen[..., 0]).sum(axis=0)
        before = np.append(0, work.cumsum())
        shares = before[-1] * np.arange(1, self.ranks) // self.ranks
        bounds = [0, *np.searchsorted(before, shares).tolist(), len(work)]
        pieces = [
            (owner, rank, max(first, start), min(last, stop))
            for rank, (first, last) in enumerate(pairwise(bounds))
            for owner, (start, stop) in enumerate(pairwise(self.cut.bounds))
            if max(first, start) < min(last, stop)
        ]
        usual, largest = (max(self.work(some, work)) for some in (self.usual, pieces))
        return pieces if largest < (1 - GAIN) * usual else self.usual

    def work(self, pieces: list[Piece], work: Array) -> list[int]:
        """Return the work of each rank, from that of each query."""
        parts = [(rank, work[start:stop].sum()) for _, rank, start, stop in pieces]
        return [int(sum(part for r, part in parts if r == rank)) for rank in range(self.ranks)]

    def _blocks(
        self, pieces: list[Piece], place: int, exist: Array | None, bias: Array | None
    ) -> Iterator[tuple[int, tuple[slice, slice], dict[str, Any]]]:
        """Yield own pieces that see keys of a rank, places in the bias, and arguments of kernels.

        With the intervals of keys that exist in each sample, if they differ.
        """
        first, last = self.keys.bounds[place : place + 2]
        row = 0
        for i, (*_, start, stop) in enumerate(pieces):
            rows, row = slice(row, row + stop - start), row + stop - start
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
            columns = slice(first, last)
            arguments: dict[str, Any] = {
                "at": At(start, first, max(self.all_positions)),
                "seen": seen,
            }
            if bias is not None:
                arguments["bias"] = self.xp.ascontiguousarray(bias[:, rows, columns])
            yield i, (rows, columns), arguments

    def _own(self, array: Array, piece: Piece) -> Array:
        """Return a copy of own positions (N, n, D) of an array."""
        first = self.cut.bounds[self.place]
        return array[:, piece[2] - first : piece[3] - first].copy()

    def _moved(self, given: dict[Piece, Array], pieces: list[Piece], n: int, to: int) -> Steps:
        """Send pieces to the ranks that compute them (`to` is 1), or that have them (0).

        Returns the arrays of n samples that are here then, and the exchange to wait for.
        """
        here = [piece for piece in pieces if piece[to] == self.place]
        taken = [
            given[piece]
            if piece in given
            else self.backend.empty((n, piece[3] - piece[2], self.output_shape[1]), self.dtype)
            for piece in here
        ]
        sends = [(x, p[to]) for p, x in given.items() if p[to] != self.place and x.size]
        receives = [
            (x, p[1 - to]) for p, x in zip(here, taken, strict=True) if p not in given and x.size
        ]
        pending = None
        if any(owner != rank for owner, rank, *_ in pieces):  # the same collectives on all ranks
            pending = yield Messages(sends, receives, self.cut.axis)
        return taken, Pending(None, lambda: pending and pending.wait())

    def _send_pieces(self, array: Array, pieces: list[Piece]) -> Steps:
        """Send own positions of an array (N, t, D) to the ranks that compute them."""
        own = {piece: self._own(array, piece) for piece in pieces if piece[0] == self.place}
        return (yield from self._moved(own, pieces, len(array), 1))

    def _return_pieces(self, given: dict[Piece, Array], pieces: list[Piece], n: int) -> Steps:
        """Send results of own pieces to their ranks; the result is that of own positions."""
        taken, moving = yield from self._moved(given, pieces, n, 0)

        def finish() -> Array:
            moving.wait()
            return taken[0] if len(taken) == 1 else self.xp.concatenate(taken, axis=1)

        return Pending(None, finish)

    def _pass_on(self, array: Array, place: int) -> Steps:
        """Send keys and values to the next rank, and receive those of the rank before `place`."""
        before, after = (self.place - 1) % self.ranks, (self.place + 1) % self.ranks
        first, last = self.keys.bounds[(place - 1) % self.ranks :][:2]
        received = self.backend.empty((len(array), last - first, array.shape[2]), array.dtype)
        return (yield Messages([(array, after)], [(received, before)], self.cut.axis))

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Compute the output while keys and values travel."""
        (q, memory), others = self._operands(xs), xs[self.arrays :]
        exist = self._exist(others[0], context) if others else None
        options: dict[str, Any] = {
            **{"scale": self.scale, "dropout": self._dropped(context)},
            **({} if self.positions is None else self.positions.added(self)),
        }
        fixed = exist is None or "bias" in options or not self.backend.has_values
        pieces = self.usual if fixed else self.balanced(exist)
        own, kv = [piece for piece in pieces if piece[1] == self.place], memory.copy()
        queries, arriving = yield from self._send_pieces(q, pieces)
        results: list[Result | None] = [None] * len(own)
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            for i, _, where in self._blocks(own, place, exist, options.get("bias")):
                if own[i][0] != self.place:
                    arriving.wait()
                y, sums = self._nothing(queries[i])
                given = {"kv": kv, **options, **where}
                self.backend.attention.forward(
                    queries[i], self.heads, out=y, log_sums=sums, **given
                )
                results[i] = self._combined(results[i], (y, sums))
            if moving is not None:
                (kv,) = moving.wait()
        arriving.wait()
        done = [r or self._nothing(query) for r, query in zip(results, queries, strict=True)]
        outputs = {piece: y for piece, (y, _) in zip(own, done, strict=True)}
        y = (yield from self._return_pieces(outputs, pieces, len(q))).wait()
        # Own queries and outputs are saved by the layers beside this one.
        taken = [
            (None, None, sums) if piece[0] == self.place else (query, part, sums)
            for piece, query, (part, sums) in zip(own, queries, done, strict=True)
        ]
        return y, (q, memory, y, taken, exist, options, pieces)

    def _nothing(self, query: Array) -> Result:
        """Return the result of queries that see no key."""
        sums = self.backend.empty((len(query), self.heads, query.shape[1]), query.dtype)
        sums[...] = -self.xp.inf
        return self.backend.zeros(query.shape, query.dtype), sums

    def _combined(self, one: Result | None, other: Result) -> Result:
        """Return the result with the keys of two blocks."""
        if one is None:
            return other
        if not self.backend.has_values:
            return one[0], self.xp.empty_like(one[1])
        sums = self.xp.logaddexp(one[1], other[1])
        whole = self.xp.where(sums == -self.xp.inf, 0, sums)  # where no key is seen
        for y, own in (one, other):
            share = self.xp.exp(own - whole).transpose(0, 2, 1)[..., None]  # (N, n, H, 1)
            heads = y.reshape(*y.shape[:2], self.heads, y.shape[2] // self.heads)
            self.xp.multiply(heads, share, out=heads)
        return self.xp.add(one[0], other[0], out=one[0]), sums

    def backward_steps(self, dy: Array, saved: Saved, *, joint: bool) -> Steps:
        """Compute dx while keys, values and their gradients travel."""
        queries, memory, y, taken, exist, options, pieces = saved
        own = [piece for piece in pieces if piece[1] == self.place]
        table = None if self.positions is None else self.positions.gradient(self, options)
        if table is not None:
            table[...] = 0  # of pairs that are not multiplied
        dys, arriving = yield from self._send_pieces(dy, pieces)
        operands = [
            (self._own(queries, piece), self._own(y, piece), sums) if q is None else (q, of, sums)
            for piece, (q, of, sums) in zip(own, taken, strict=True)
        ]
        dqs = [self.backend.zeros(part[0].shape, dy.dtype) for part in operands]
        kv = memory.copy()
        sent: Any = None
        for step in range(self.ranks):
            place, moving = (self.place - step) % self.ranks, None
            if step < self.ranks - 1:
                moving = yield from self._pass_on(kv, place)
            dkv = self.backend.zeros(kv.shape, dy.dtype)
            for i, pairs, where in self._blocks(own, place, exist, options.get("bias")):
                if own[i][0] != self.place:
                    arriving.wait()
                q, of, log_sums = operands[i]
                dq, term = (self.backend.empty(part.shape, dy.dtype) for part in (q, kv))
                d_bias = None if table is None else self.xp.empty_like(where["bias"])
                given = {"kv": kv, "out_kv": term, "out_bias": d_bias, **options, **where}
                self.backend.attention.backward(
                    *(dys[i], q, of, log_sums, self.heads),
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
        arriving = yield from self._return_pieces(dict(zip(own, dqs, strict=True)), pieces, len(dy))
        if self.positions is not None:
            self.positions.accumulate(self, table)
        gradients = [self.empty(len(dy), shape) for shape in self.input_shapes[: self.arrays]]
        d_queries, d_memory = self._operands(gradients)
        d_queries[...] = arriving.wait()
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

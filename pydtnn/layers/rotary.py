"""Rotary positions, and keys and values that several heads share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost
from pydtnn.layers.sequence import TakesDocuments
from pydtnn.utils.validate import check_float, check_int


@lru_cache(maxsize=8)
def _tables(start: int, stop: int, width: int, base: float, dtype: np.dtype) -> list[np.ndarray]:
    """Return the cosines and sines of the angles of positions, which equal layers share."""
    angles = np.arange(start, stop)[:, None] * base ** (-np.arange(0, width, 2) / width)
    return [f(angles)[:, None].astype(dtype) for f in (np.cos, np.sin)]


class Rotary(TakesDocuments):
    """Rotate queries and keys by angles that grow with their position, for `DotProductAttention`.

    Elements ``i`` and ``i + E / 2`` of a head of E elements are a point of the plane, which is
    rotated by ``t base^(-2 i / E)`` at position t, so that products of queries and keys depend on
    the difference of their positions. If there are fewer keys and values than queries, each of them
    is repeated for the consecutive heads that share it, as `DotProductAttention` requires.

    Parameters
    ----------
    heads : int
        Of the queries; a multiple of those of the keys and values.
    base : float

    Notes
    -----
    Inputs ``(N, T, H E)``, the queries of H heads, and twice ``(N, T, G E)``, the keys and values
    of G groups of heads. Output ``(N, T, 3 H E)``. If a fourth input ``(N, T)`` is the document of
    each position (see `DotProductAttention`), positions are counted from the first one of their
    document.

    References
    ----------
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, section 3.2.2,
    with the pairs of elements of GPT-NeoX and Llama. Ainslie et al., "GQA: training generalized
    multi-query transformer models from multi-head checkpoints", EMNLP 2023, section 2.2.
    """

    saves = ()
    new_results = RESULTS
    sequences = 3

    def __init__(self, heads: int, *, base: float = 10000.0, name: str | None = None) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.heads = check_int(who, "heads", heads, at_least=1)
        self.base = check_float(who, "base", base, above=0)

    def build(self, *shapes: Shape) -> Shape:
        """Find the groups, and compute the cosines and sines of all angles (T, 1, E / 2)."""
        expected = "expected queries (T, H E), keys and values (T, G E)"
        if len(shapes) < 3 or shapes[1] != shapes[2] or any(len(s) != 2 for s in shapes[:3]):
            raise self.fail(f"{expected}, got {' and '.join(map(str, shapes))}")
        (length, features), (others, shared) = shapes[:2]
        self.width, rest = divmod(features, self.heads)
        width = self.width
        self.groups = shared // width if width else 0
        if length != others or rest or width % 2 or not self.groups or shared % width:
            raise self.fail(
                f"{expected} with H={self.heads} and E even, got {shapes[0]}, {shapes[1]}"
            )
        if self.heads % self.groups:
            raise self.fail(
                f"heads must be a multiple of those of keys and values, got {self.heads} and "
                f"{self.groups}"
            )
        own = None if len(shapes) > 3 else self.own_positions
        start = own.start if own else 0
        stop = start + self.check_documents(length, shapes[3:])
        tables = _tables(start, stop, width, self.base, self.dtype)
        self.cos, self.sin = (self.backend.asarray(table, self.dtype) for table in tables)
        return length, 3 * features

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Rotate queries and keys; copy values; repeat what heads share."""
        q, k, v = map(self._heads, xs[:3])
        places = self.places(xs[3], context) if len(xs) > 3 else slice(None)
        cos, sin = self.cos[places], self.sin[places]
        y = self.empty(len(q), self.output_shape)
        queries, keys, values = self._thirds(y)
        queries[...] = self._rotated(q, cos, sin).reshape(queries.shape)
        keys[...] = self._rotated(k, cos, sin)[:, :, :, None]
        values[...] = v[:, :, :, None]
        return y, places

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, ...]:
        """Add up what heads share; rotate back."""
        queries, keys, values = self._thirds(dy)
        cos, sin = self.cos[saved], -self.sin[saved]
        dq = queries.reshape(*dy.shape[:2], self.heads, self.width)  # (N, T, H, E)
        parts = self._rotated(dq, cos, sin), self._rotated(keys.sum(axis=3), cos, sin)
        gradients = [*parts, values.sum(axis=3)]
        shapes = self.input_shapes
        gradients += [self.backend.zeros((len(dy), *s), self.dtype) for s in shapes[3:]]
        return tuple(d.reshape(len(dy), *s) for d, s in zip(gradients, shapes, strict=True))

    def cost(self, batch: int) -> Cost:
        """Two products and a sum for each element of queries and keys; copies; sums of groups."""
        outputs, itemsize = self.elements(batch)[1], self.dtype.itemsize
        inputs = batch * sum(length * n for length, n in self.input_shapes[:3])
        rotated = 3 * batch * sum(length * n for length, n in self.input_shapes[:2])
        moved = (inputs + outputs) * itemsize
        return Cost(rotated, rotated + outputs - inputs, moved, moved)

    def _heads(self, x: Array) -> Array:
        heads = x.shape[2] // self.width
        return x.reshape(*x.shape[:2], heads, self.width)  # (N, T, H E) -> (N, T, H, E)

    def _thirds(self, y: Array) -> tuple[Array, ...]:
        """Return views (N, T, G, H / G, E) of queries, keys and values in an output."""
        each = self.heads // self.groups
        parts = y.reshape(*y.shape[:2], 3, self.groups, each, self.width)
        return tuple(parts[:, :, i] for i in range(3))

    def _rotated(self, x: Array, cos: Array, sin: Array) -> Array:
        """Return heads (N, T, H, E) rotated by angles, ``(T, 1, E / 2)`` or ``(N, ...)``."""
        a, b = self.xp.split(x, 2, axis=-1)
        return self.xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

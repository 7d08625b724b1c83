"""Reference kernels of scaled dot-product attention.

Queries, keys and values are parts of one array, ``qkv (N, T, 3 D)``: a row has the queries of all
heads, then the keys, then the values, each head with ``E = D / heads`` elements. This is the output
of one linear layer. The reference stores all ``T x T`` scores; kernels of devices need not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array, Family, wide
from pydtnn.kernels.reference.random import bits

BLOCK = 4
"""Random words of a counter; each row of a mask starts with a new one."""


class Dropped(NamedTuple):
    """Dropout of attention weights: the arguments of `pydtnn.kernels.reference.Random.dropout`.

    Weight ``(h, i, j)`` of a sample is kept if word ``((f + h) T + i) R + j`` of its `bits` is at
    least ``floor(rate 2**32)``, with T rounded up to a multiple of 4 as R, and `first_head` as f:
    the number of heads before those of the arrays, which may be a part of all.
    """

    rate: float
    seed: int
    stream: int
    epoch: int
    samples: np.ndarray
    first_head: int = 0


class Attention(Family):
    """``softmax(q k' / sqrt(E)) v`` of each head, with weights ``softmax(...)`` ``(T, T)``.

    With `causal`, position ``i`` has no weights for the positions after it. With `lengths` (N,) of
    int64, only the first positions of a sample exist: outputs and gradients of the others are 0.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, sections 3.2.1 and 3.2.2.
    """

    def forward(
        self,
        qkv: Array,
        heads: int,
        *,
        out: Array,
        log_sums: Array,
        causal: bool = False,
        lengths: Array | None = None,
        dropout: Dropped | None = None,
    ) -> None:
        """Compute `out` (N, T, D), and the logarithm of each row's sum of exponentials.

        `log_sums` is (N, heads, T), of float32 for 16-bit arrays: ``exp(scores - log_sums)`` are
        the weights, which backward computes again.
        """
        q, k, v = self._split(qkv, heads)
        scores = self._scores(q, k, causal, lengths)
        top = scores.max(axis=-1, keepdims=True)
        top = self.xp.where(top == -self.xp.inf, 0, top)  # of positions that do not exist
        e = self.xp.exp(scores - top)
        total = e.sum(axis=-1, keepdims=True)
        total = self.xp.where(total == 0, 1, total)
        log_sums[...] = (top + self.xp.log(total))[..., 0]
        y = self.product(self._drop(e / total, dropout), v)
        out[...] = y.transpose(0, 2, 1, 3).reshape(out.shape)  # (N, H, T, E) -> (N, T, D)

    def backward(
        self,
        dy: Array,
        qkv: Array,
        y: Array,
        log_sums: Array,
        heads: int,
        *,
        out: Array,
        causal: bool = False,
        lengths: Array | None = None,
        dropout: Dropped | None = None,
    ) -> None:
        """Compute the gradient of `qkv` into `out` (N, T, 3 D), from the results of forward.

        With the weights ``p = softmax(s)``: ``dv = p' dy``, ``dp = dy v'``, ``ds = p (dp - sum(p
        dp))``, where the sum is ``sum(dy y)``, ``dq = ds k / sqrt(E)`` and ``dk = ds' q / sqrt(E)``
        (Dao et al. 2022, appendix B.2).
        """
        q, k, v = self._split(qkv, heads)
        dy, y = self._heads(dy, heads), self._heads(y, heads)
        p = self.xp.exp(self._scores(q, k, causal, lengths) - log_sums[..., None])
        dv = self.product(_turned(self._drop(p, dropout)), dy)
        dp = self._drop(self.product(dy, _turned(v)), dropout)
        ds = p * (dp - (dy * y).sum(axis=-1, keepdims=True)) / q.shape[-1] ** 0.5
        gradients = self.xp.stack([self.product(ds, k), self.product(_turned(ds), q), dv])
        out[...] = gradients.transpose(1, 3, 0, 2, 4).reshape(out.shape)  # (3, N, H, T, E)

    def product(self, a: Array, b: Array) -> Array:
        """Compute ``a b`` of each sample and head, (N, H, M, K) and (N, H, K, L)."""
        return a @ b

    def _split(self, qkv: Array, heads: int) -> tuple[Array, Array, Array]:
        """Return queries, keys and values (N, H, T, E)."""
        features = qkv.shape[-1] // 3
        q, k, v = (
            self._heads(qkv[..., i * features : (i + 1) * features], heads) for i in range(3)
        )
        return q, k, v

    @staticmethod
    def _heads(x: Array, heads: int) -> Array:
        n, length, features = x.shape
        return wide(x).reshape(n, length, heads, features // heads).transpose(0, 2, 1, 3)

    def _scores(self, q: Array, k: Array, causal: bool, lengths: Array | None) -> Array:
        """Compute ``q k' / sqrt(E)``, -infinity for positions that have no weight."""
        scores = self.product(q, _turned(k)) / q.shape[-1] ** 0.5
        length = q.shape[2]
        if causal:
            scores = self.xp.where(self.xp.tri(length, dtype=bool), scores, -self.xp.inf)
        if lengths is not None:
            exist = self.xp.arange(length) < lengths[:, None]  # (N, T)
            pairs = exist[:, None, :, None] & exist[:, None, None, :]
            scores = self.xp.where(pairs, scores, -self.xp.inf)
        return scores

    def _drop(self, weights: Array, dropout: Dropped | None) -> Array:
        """Zero dropped weights and multiply the others by ``1 / (1 - rate)``."""
        if dropout is None:
            return weights
        rate, seed, stream, epoch, samples, first = dropout
        n, heads, length, _ = weights.shape
        row = -(-length // BLOCK) * BLOCK
        words = bits(seed, stream, epoch, samples, (first + heads) * length * row)
        words = words.reshape(n, first + heads, length, row)[:, first:]
        keep = self.xp.asarray(words[..., :length] >= np.uint32(int(rate * 2.0**32)))
        return self.xp.where(keep, weights * (1 / (1 - rate)), 0)


def _turned(x: Array) -> Array:
    return x.transpose(0, 1, 3, 2)

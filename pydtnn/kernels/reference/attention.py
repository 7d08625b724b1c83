"""Reference kernels of scaled dot-product attention.

Queries, keys and values are parts of one array, ``qkv (N, T, 3 D)``: a row has the queries of all
heads, then the keys, then the values, each head with ``E = D / heads`` elements. This is the output
of one linear layer. The reference stores all ``T x T`` scores; kernels of devices need not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array, KernelFamily, wide
from pydtnn.kernels.reference.random import bits

BLOCK = 4
"""Random words of a counter; each row of a mask starts with a new one."""


class AttentionDropout(NamedTuple):
    """Dropout of attention weights, as arguments of `RandomKernels.dropout`.

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


class At(NamedTuple):
    """Where queries and keys are in a sequence: their first positions, and its positions T."""

    query: int
    key: int
    length: int


class AttentionKernels(KernelFamily):
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
        kv: Array | None = None,
        at: At | None = None,
        causal: bool = False,
        lengths: Array | None = None,
        dropout: AttentionDropout | None = None,
    ) -> None:
        """Compute `out` (N, T, D), and the logarithm of each row's sum of exponentials.

        `log_sums` is (N, heads, T), of float32 for 16-bit arrays: ``exp(scores - log_sums)`` are
        the weights, which backward computes again.

        With keys and values ``kv (N, T2, 2 D)`` of other positions than the queries, (N, T1, D) in
        the place of `qkv`, the same is computed as if there were no others; `causal` queries are
        not before the first key. Outputs ``y`` with `log_sums` l of several blocks of keys are
        those of all of them as ``sum y exp(l - L)`` with ``L = log sum exp l`` (Milakov and
        Gimelshein, 2018).
        """
        q, k, v, at = self._operands(qkv, kv, heads, at)
        scores = self._scores(q, k, causal, at, lengths)
        top = scores.max(axis=-1, keepdims=True)
        top = self.xp.where(top == -self.xp.inf, 0, top)  # of positions that do not exist
        e = self.xp.exp(scores - top)
        total = e.sum(axis=-1, keepdims=True)
        total = self.xp.where(total == 0, 1, total)
        log_sums[...] = (top + self.xp.log(total))[..., 0]
        y = self._product(_drop(e / total, self._kept(scores, dropout, at)), v)
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
        kv: Array | None = None,
        at: At | None = None,
        out_kv: Array | None = None,
        causal: bool = False,
        lengths: Array | None = None,
        dropout: AttentionDropout | None = None,
    ) -> None:
        """Compute the gradient of `qkv` into `out` (N, T, 3 D), from the results of forward.

        With the weights ``p = softmax(s)``: ``dv = p' dy``, ``dp = dy v'``, ``ds = p (dp - sum(p
        dp))``, where the sum is ``sum(dy y)``, ``dq = ds k / sqrt(E)`` and ``dk = ds' q / sqrt(E)``
        (Dao et al. 2022, appendix B.2).

        With `kv`, the terms of this block in the gradients of queries and of `kv`, into `out` and
        `out_kv`; `y` and `log_sums` are those of all blocks of keys.
        """
        q, k, v, at = self._operands(qkv, kv, heads, at)
        p = self.xp.exp(self._scores(q, k, causal, at, lengths) - log_sums[..., None])
        kept, dy, y = self._kept(p, dropout, at), self._heads(dy, heads), self._heads(y, heads)
        dv = self._product(_turned(_drop(p, kept)), dy)
        dp = _drop(self._product(dy, _turned(v)), kept)
        ds = p * (dp - (dy * y).sum(axis=-1, keepdims=True)) / q.shape[-1] ** 0.5
        dq, dk = self._product(ds, k), self._product(_turned(ds), q)
        if out_kv is None:
            self._join([dq, dk, dv], out)
        else:
            self._join([dq], out)
            self._join([dk, dv], out_kv)

    def _operands(
        self, qkv: Array, kv: Array | None, heads: int, at: At | None
    ) -> tuple[Array, Array, Array, At]:
        """Return queries, keys and values (N, H, T, E), and where they are."""
        if kv is None or at is None:
            q, k, v = self._split(qkv, heads, 3)
            return q, k, v, At(0, 0, qkv.shape[1])
        (q,), (k, v) = self._split(qkv, heads, 1), self._split(kv, heads, 2)
        return q, k, v, at

    def _join(self, gradients: list[Array], out: Array) -> None:
        """Write gradients (N, H, T, E) next to each other."""
        together = self.xp.stack(gradients).transpose(1, 3, 0, 2, 4)  # (N, T, 1 to 3, H, E)
        out[...] = together.reshape(out.shape)

    def _product(self, a: Array, b: Array) -> Array:
        """Compute ``a b`` of each sample and head, (N, H, M, K) and (N, H, K, L)."""
        return a @ b

    def _split(self, x: Array, heads: int, parts: int) -> list[Array]:
        """Return the parts (N, H, T, E) of an array, such as queries, keys and values."""
        features = x.shape[-1] // parts
        return [self._heads(x[..., i * features : (i + 1) * features], heads) for i in range(parts)]

    @staticmethod
    def _heads(x: Array, heads: int) -> Array:
        n, length, features = x.shape
        return wide(x).reshape(n, length, heads, features // heads).transpose(0, 2, 1, 3)

    def _scores(
        self, q: Array, k: Array, causal: bool, at: At, lengths: Array | None = None
    ) -> Array:
        """Compute ``q k' / sqrt(E)``, -infinity for positions that have no weight."""
        scores = self._product(q, _turned(k)) / q.shape[-1] ** 0.5
        if causal:
            seen = self.xp.tri(*scores.shape[2:], at.query - at.key, dtype=bool)
            scores = self.xp.where(seen, scores, -self.xp.inf)
        if lengths is not None:
            exist = self.xp.arange(at.length) < lengths[:, None]  # (N, T)
            pairs = exist[:, None, :, None] & exist[:, None, None, :]
            scores = self.xp.where(pairs, scores, -self.xp.inf)
        return scores

    def _kept(self, weights: Array, dropout: AttentionDropout | None, at: At) -> Array | None:
        """Return the factors of weights: 0 if they are dropped, ``1 / (1 - rate)`` otherwise."""
        if dropout is None:
            return None
        rate, seed, stream, epoch, samples, first = dropout
        n, heads, queries, keys = weights.shape
        row = -(-at.length // BLOCK) * BLOCK
        words = bits(seed, stream, epoch, samples, (first + heads) * at.length * row)
        words = words.reshape(n, first + heads, at.length, row)[:, first:]
        words = words[:, :, at.query : at.query + queries, at.key : at.key + keys]
        keep = self.xp.asarray(words >= np.uint32(int(rate * 2.0**32)))
        return self.xp.where(keep, weights.dtype.type(1 / (1 - rate)), weights.dtype.type(0))


def _drop(weights: Array, kept: Array | None) -> Array:
    return weights if kept is None else weights * kept


def _turned(x: Array) -> Array:
    return x.transpose(0, 1, 3, 2)

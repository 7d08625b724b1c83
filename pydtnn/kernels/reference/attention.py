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
    """``softmax(q k' scale + bias) v`` of each head, with weights ``softmax(...)`` ``(T1, T2)``.

    The arguments of both directions that say which keys a query attends to, and how much:

    seen : Array, optional
        ``(N, T1, 2)`` or ``(1, T1, 2)`` of int64: a query attends to the keys from the first
        number on, as far as before the second, which are in 0..T2; all keys by default. Outputs
        and gradients of queries that attend to no key are 0, as are the gradients of keys that no
        query attends to. Padding, causal order, documents of a packed sequence and windows are such
        intervals.
    scale : float, optional
        By default ``1 / sqrt(E)``.
    bias : Array, optional
        ``(H, T1, T2)``, finite, added to the scores of all samples. Its gradient is the sum over
        samples of those of the scores.
    slopes : Array, optional
        ``(H,)`` of float64: ``-slope |i - j|`` is added to the score of positions i and j.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, sections 3.2.1 and 3.2.2. Press et
    al., "Train short, test long: attention with linear biases", ICLR 2022 (`slopes`). Raffel et
    al., "Exploring the limits of transfer learning", JMLR 2020, section 2.1 (`bias`).
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
        seen: Array | None = None,
        scale: float | None = None,
        bias: Array | None = None,
        slopes: Array | None = None,
        dropout: AttentionDropout | None = None,
    ) -> None:
        """Compute `out` (N, T, D), and the logarithm of each row's sum of exponentials.

        `log_sums` is (N, heads, T), of float32 for 16-bit arrays: ``exp(scores - log_sums)`` are
        the weights, which backward computes again.

        With keys and values ``kv (N, T2, 2 D)`` of other positions than the queries, (N, T1, D) in
        the place of `qkv`, the same is computed as if there were no others. Outputs ``y`` with
        `log_sums` l of several blocks of keys are those of all of them as ``sum y exp(l - L)`` with
        ``L = log sum exp l`` (Milakov and Gimelshein, 2018), where l is -infinity of queries that
        see no key of a block.
        """
        q, k, v, at = self._operands(qkv, kv, heads, at)
        scores = self._scores(q, k, at, seen, scale, bias, slopes)
        top = scores.max(axis=-1, keepdims=True)
        top = self.xp.where(top == -self.xp.inf, 0, top)  # of queries that see no key
        e = self.xp.exp(scores - top)
        total = e.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            log_sums[...] = (top + self.xp.log(total))[..., 0]
        weights = e / self.xp.where(total == 0, 1, total)
        y = self._product(_drop(weights, self._kept(scores, dropout, at)), v)
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
        seen: Array | None = None,
        scale: float | None = None,
        bias: Array | None = None,
        out_bias: Array | None = None,
        slopes: Array | None = None,
        dropout: AttentionDropout | None = None,
    ) -> None:
        """Compute the gradient of `qkv` into `out` (N, T, 3 D), from the results of forward.

        With the weights ``p = softmax(s)``: ``dv = p' dy``, ``dp = dy v'``, ``ds = p (dp - sum(p
        dp))``, where the sum is ``sum(dy y)``, ``dq = ds k scale`` and ``dk = ds' q scale`` (Dao et
        al. 2022, appendix B.2).

        With `kv`, the terms of this block in the gradients of queries and of `kv`, into `out` and
        `out_kv`; `y` and `log_sums` are those of all blocks of keys. `out_bias` (H, T1, T2) is the
        gradient of the bias.
        """
        q, k, v, at = self._operands(qkv, kv, heads, at)
        scores = self._scores(q, k, at, seen, scale, bias, slopes)
        sums = self.xp.where(log_sums == -self.xp.inf, 0, log_sums)
        p = self.xp.exp(scores - sums[..., None])
        kept, dy, y = self._kept(p, dropout, at), self._heads(dy, heads), self._heads(y, heads)
        dv = self._product(_turned(_drop(p, kept)), dy)
        dp = _drop(self._product(dy, _turned(v)), kept)
        ds = p * (dp - (dy * y).sum(axis=-1, keepdims=True))
        if out_bias is not None:
            out_bias[...] = ds.sum(axis=0)
        ds *= q.shape[-1] ** -0.5 if scale is None else scale
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
        if kv is None:
            q, k, v = self._split(qkv, heads, 3)
        else:
            (q,), (k, v) = self._split(qkv, heads, 1), self._split(kv, heads, 2)
        return q, k, v, at or At(0, 0, max(q.shape[2], k.shape[2]))

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
        self,
        q: Array,
        k: Array,
        at: At,
        seen: Array | None,
        scale: float | None,
        bias: Array | None,
        slopes: Array | None,
    ) -> Array:
        """Compute ``q k' scale + bias``, -infinity for keys that a query does not see."""
        scores = self._product(q, _turned(k)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        keys = self.xp.arange(k.shape[2])
        if bias is not None:
            scores += bias
        if slopes is not None:
            queries = self.xp.arange(q.shape[2])[:, None] + (at.query - at.key)
            scores -= self.xp.asarray(slopes)[:, None, None] * abs(queries - keys)
        if seen is not None:
            first, end = seen[:, None, :, :1], seen[:, None, :, 1:]  # (N, 1, T1, 1)
            scores = self.xp.where((first <= keys) & (keys < end), scores, -self.xp.inf)
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

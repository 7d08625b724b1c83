"""Compiled attention, which stores no matrix of weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels.cpu._attention import AttentionKernels
from pydtnn.kernels.cpu.compiled import (
    Compiled,
    Widened,
    contiguous,
    native,
    require,
    through_float32,
)
from pydtnn.kernels.reference import attention as reference
from pydtnn.kernels.reference.attention import At, AttentionDropout
from pydtnn.kernels.reference.family import Array

WORD = 0xFFFFFFFF


class CpuAttention(Widened, Compiled, reference.AttentionKernels):
    """Attention on the CPU; shapes as in the reference."""

    table = AttentionKernels

    @through_float32
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
        """Compute `out` (N, T, D), and the logarithm of each row's sum of exponentials."""
        require(native(out, qkv, kv, bias) and native(log_sums, out))
        options = heads, at, *_added(qkv, seen, scale, bias, slopes), _numbers(dropout)
        kv = None if kv is None else contiguous(kv)
        self.kernels.forward(contiguous(qkv), kv, *options, out, log_sums, self.threads)

    @through_float32
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
        """Compute the gradient of `qkv` into `out` (N, T, 3 D), from the results of forward."""
        gradients = [x for x in (out_kv, out_bias) if x is not None]
        require(native(out, dy, qkv, kv, y, log_sums, bias) and all(map(native, gradients)))
        options = heads, at, *_added(qkv, seen, scale, bias, slopes), _numbers(dropout)
        kv = None if kv is None else contiguous(kv)
        dy, qkv, y, log_sums = map(contiguous, (dy, qkv, y, log_sums))
        self.kernels.backward(
            dy, qkv, kv, y, log_sums, *options, out, *(out_kv, out_bias), self.threads
        )


def _added(
    q: Array,
    seen: Array | None,
    scale: float | None,
    bias: Array | None,
    slopes: Array | None,
) -> tuple[Any, ...]:
    """Return what scores depend on as the kernels take it."""
    if seen is not None:
        seen = contiguous(np.asarray(seen, np.int64))
        if len(seen) not in (1, len(q)) or seen.shape[1:] != (q.shape[1], 2):
            raise ValueError(f"attention: an array of intervals has the shape {seen.shape}")
    slopes = None if slopes is None else contiguous(np.asarray(slopes, np.float64))
    return seen, scale, None if bias is None else contiguous(bias), slopes


def _numbers(dropout: AttentionDropout | None) -> tuple[Any, ...] | None:
    """Return samples, key, threshold, factor and the first head as the kernels take them."""
    if dropout is None:
        return None
    rate, seed, stream, epoch, samples, first_head = dropout
    return (
        np.require(samples, np.int64, ["C", "A"]),
        *(seed & WORD, stream & WORD, epoch & WORD),
        *(int(rate * 2.0**32), 1 / (1 - rate), first_head),
    )

"""What compression of gradients costs: bytes of messages, time of the processor, and memory.

Lengths and speed are those of the compressor itself, which is called on random gradients on this
machine; so it works for compressors of users, too. The products of PowerSGD are bound by the
memory bandwidth of the platform.
"""

from __future__ import annotations

import timeit
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pydtnn.comm import Serial
from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.parallel.compression import COMPRESSOR, CompressedSums, Compressor, Context, PowerSGD
from pydtnn.tools.perfmodel.outline import BucketOutline

SAMPLE = 1 << 18
"""Elements of the gradients on which a compressor is tried."""

LOW_RANK_ACCESSES = 10
"""Numbers that PowerSGD reads and writes for each element of a matrix: it adds the error, computes
two products, subtracts one, and restores the sum."""

SIDE = 512
"""Rows and columns of the matrix on which temporary memory is measured."""

REPEATS = 4
"""Number of times that it is tried; the fastest one counts."""


@dataclass(frozen=True)
class Compression:
    """Costs of a compressor.

    Attributes
    ----------
    adds : bool
        Whether messages are summed, or the parts that ranks serve; otherwise each rank sends its
        own to all others.
    ratio : float
        Bytes of a message per byte of gradients.
    compress, restore : float
        Time for an element, in s.
    rank : int
        Of low-rank products, 0 for other compressors.
    """

    adds: bool
    ratio: float = 1.0
    compress: float = 0.0
    restore: float = 0.0
    rank: int = 0

    def messages(self, bucket: BucketOutline) -> tuple[float, ...]:
        """Return the length of each message of a bucket, in B."""
        if not self.rank:
            return (self.ratio * bucket.nbytes,)
        pays = [(n, m) for n, m in bucket.matrices if self.rank * (n + m) < n * m]
        rest = bucket.vectors + sum(n * m for n, m in bucket.matrices if (n, m) not in pays)
        first = rest + self.rank * sum(n for n, _ in pays)
        second = self.rank * sum(m for _, m in pays)
        return first * bucket.itemsize, second * bucket.itemsize

    def work(self, bucket: BucketOutline, ranks: int) -> float:
        """Return the time to compress a bucket and to restore what is received, in s."""
        if self.rank:
            elements = sum(n * m for n, m in bucket.matrices)
            return elements * self.compress
        received = 1 if self.adds else ranks
        return bucket.elements * (self.compress + received * self.restore)


def find_compression(
    name: str | Callable[..., Any], options: Mapping[str, Any], bandwidth: float
) -> Compression:
    """Return the costs of a compressor of this name.

    Parameters
    ----------
    name : str or callable
    options : mapping
    bandwidth : float
        Memory bandwidth of a rank, in B/s.

    Raises
    ------
    TypeError, ValueError
        If the name or an option is unknown.
    """
    made = COMPRESSOR.find(name).make(dict(options))
    sums = made(Serial())
    if isinstance(sums, CompressedSums):
        return _measure(sums.compressor)
    if isinstance(sums, PowerSGD):
        seconds = LOW_RANK_ACCESSES * 4 / bandwidth
        return Compression(adds=True, compress=seconds, rank=sums.rank)
    raise ValueError(
        f"compression: expected a Compressor or power_sgd, got {made!r}; its messages are not known"
    )


def _measure(compressor: Compressor) -> Compression:
    x = np.random.default_rng(0).standard_normal(SAMPLE).astype("float32")
    out = np.zeros_like(x)
    context = Context(0, 0, 0, 0, (SAMPLE,), ((SIDE, SAMPLE // SIDE),))
    parts = compressor.compress(x, context)
    calls = partial(compressor.compress, x), partial(compressor.restore, parts, out)
    compress, restore = (
        min(timeit.repeat(partial(call, context), repeat=REPEATS, number=1)) / SAMPLE
        for call in calls
    )
    ratio = sum(part.nbytes for part in parts) / x.nbytes
    feedback = restore if compressor.feedback else 0.0  # to compute the error
    summed = compressor.adds or compressor.served
    return Compression(summed, ratio, compress + feedback, restore)


def temporary_memory(name: str | Callable[..., Any], options: Mapping[str, Any]) -> float:
    """Return bytes of temporary arrays during a sum, per byte of the bucket.

    Parameters
    ----------
    name : str or callable
    options : mapping

    Raises
    ------
    TypeError, ValueError
        If the name or an option is unknown.
    """
    sums = COMPRESSOR.find(name).make(dict(options))(Serial())
    model = Model(Linear(SIDE, bias=False), (SIDE,), backend="numpy")
    (bucket,) = model.buckets
    sums.prepare(model.buckets)
    bucket.grads[...] = np.random.default_rng(0).standard_normal(bucket.grads.shape)
    sums.start(bucket).wait()
    traced = tracemalloc.is_tracing()
    tracemalloc.start()  # unless it has begun
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        sums.start(bucket).wait()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not traced:
            tracemalloc.stop()
    sums.free()
    return max(peak - before, 0) / bucket.grads.nbytes

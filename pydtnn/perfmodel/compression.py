"""What compression of gradients costs: bytes of messages and time of the processor.

Lengths and speed are those of the compressor itself, which is called once on random gradients on
this machine; so it works for compressors of users, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm import Serial
from pydtnn.parallel.compression import COMPRESSOR, CompressedSums, Compressor, Context, PowerSGD
from pydtnn.perfmodel.outline import BucketOutline

SAMPLE = 1 << 18
"""Elements of the gradients on which a compressor is tried."""

REPEATS = 4
"""Number of times that it is tried; the fastest one counts."""


@dataclass(frozen=True)
class Compression:
    """Costs of a compressor.

    Attributes
    ----------
    adds : bool
        Whether messages are summed; otherwise each rank sends its own to all others.
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


def find_compression(name: str | Callable[..., Any], options: Mapping[str, Any]) -> Compression:
    """Return the costs of a compressor of this name, measured here.

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
        return Compression(adds=True, compress=_low_rank(sums.rank), rank=sums.rank)
    raise ValueError(
        f"compression: expected a Compressor or power_sgd, got {made!r}; its messages are not known"
    )


def _measure(compressor: Compressor) -> Compression:
    x = np.random.default_rng(0).standard_normal(SAMPLE).astype("float32")
    out = np.zeros_like(x)
    context = Context(0, 0, 0, 0, (SAMPLE,))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        parts = compressor.compress(x, context)
        middle = time.perf_counter()
        compressor.restore(parts, out, context)
        end = time.perf_counter()
        times.append((middle - start, end - middle))
    compress, restore = (min(each) / SAMPLE for each in zip(*times, strict=True))
    ratio = sum(part.nbytes for part in parts) / x.nbytes
    feedback = restore if compressor.feedback else 0.0  # to compute the error
    return Compression(compressor.adds, ratio, compress + feedback, restore)


def _low_rank(rank: int) -> float:
    """Return the time of an element of a matrix in the products of PowerSGD, in s."""
    n = 512
    gradient = np.ones((n, n), "float32")
    q = np.ones((n, rank), "float32")
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        p = gradient @ q
        directions, _ = np.linalg.qr(p)
        q = gradient.T @ directions
        gradient -= directions @ q.T
        gradient += directions @ q.T
        times.append(time.perf_counter() - start)
    return min(times) / n**2

"""Compression of gradients to a subset of the values, unchanged."""

from __future__ import annotations

import math

import numpy as np

from pydtnn.parallel.compression.compressor import Compressor, Context, Parts
from pydtnn.parallel.compression.floats import bounded
from pydtnn.utils.validate import check_float


def top_k(*, share: float = 0.01, feedback: bool = True, seed: int = 0) -> Compressor:
    """Send the `share` of each bucket with the largest ``|x|``, as indices and values.

    At least one value is sent. Infinite values and NaN are sent first.

    Parameters
    ----------
    share : float
        Fraction of values that are sent, in (0, 1].
    feedback, seed
        See `Compressor`. Without feedback, values that are never among the largest are never
        sent.

    References
    ----------
    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Lin et al., "Deep Gradient
    Compression", ICLR 2018, section 3.1.
    """
    share = check_float("top_k", "share", share, above=0, at_most=1)

    def compress(x: np.ndarray, context: Context) -> Parts:
        rest = x.size - _count(share, x.size)
        kept = np.argpartition(np.abs(x), rest)[rest:].astype(np.uint32)
        return kept, x[kept]

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        kept, values = parts
        out[kept] += values

    return Compressor(compress, restore, feedback=feedback, seed=seed)


def random_k(*, share: float = 0.1, feedback: bool = True, seed: int = 0) -> Compressor:
    """Send a random `share` of each bucket: an allreduce of values, without indices.

    All ranks send the same elements. With feedback, values are unchanged; without, they are divided
    by the fraction that is sent: unbiased, with a variance 1 / `share` times as large. If gradients
    are infinite or NaN, all values that are sent become NaN.

    Parameters
    ----------
    share : float
        Fraction of values that are sent, in (0, 1]; at least one value is sent.
    feedback, seed
        See `Compressor`.

    References
    ----------
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, section 2.
    """
    share = check_float("random_k", "share", share, above=0, at_most=1)

    def chosen(size: int, context: Context) -> np.ndarray:
        return context.shared_random.choice(size, _count(share, size), replace=False, shuffle=False)

    def compress(x: np.ndarray, context: Context) -> Parts:
        return (x[chosen(x.size, context)],)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        factor = 1 if feedback else out.size / _count(share, out.size)
        # Slightly below the overflow threshold, as the product is rounded.
        values = bounded(parts[0], float(np.finfo(out.dtype).max) / factor * (1 - 1e-6))
        out[chosen(out.size, context)] += values * out.dtype.type(factor)

    return Compressor(compress, restore, feedback=feedback, adds=True, seed=seed)


def _count(share: float, size: int) -> int:
    """Return how many of `size` values are sent."""
    return min(max(math.ceil(share * size), 1), size)

"""A few of the gradients, as they are."""

from __future__ import annotations

import math

import numpy as np

from pydtnn.parallel.compression.compressor import Compressor, Parts
from pydtnn.parallel.compression.context import Context
from pydtnn.parallel.compression.floats import bounded
from pydtnn.utils.validate import number


def top_k(*, share: float = 0.01, feedback: bool = True, seed: int = 0) -> Compressor:
    """Send the `share` of each bucket with the greatest ``|x|``, as indices and values.

    At least one value. What is not finite is sent first.

    Parameters
    ----------
    share : float
        Above 0, at most 1.
    feedback, seed
        See `Compressor`. Without feedback, what is never among the greatest is never learned.

    References
    ----------
    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Lin et al., "Deep Gradient
    Compression", ICLR 2018, section 3.1.
    """
    share = number("top_k", "share", share, above=0, at_most=1)

    def compress(x: np.ndarray, context: Context) -> Parts:
        rest = x.size - _count(share, x.size)
        kept = np.argpartition(np.abs(x), rest)[rest:].astype(np.uint32)
        return kept, x[kept]

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        kept, values = parts
        out[kept] += values

    return Compressor(compress, restore, feedback=feedback, seed=seed)


def random_k(*, share: float = 0.1, feedback: bool = True, seed: int = 0) -> Compressor:
    """Send a random `share` of each bucket, the same on all ranks; only values travel, and add up.

    With feedback, values are sent as they are; without, they are divided by the share of those that
    are sent, so that the mean is right, but the variance 1 / share times as large. Where gradients
    are not finite, all values that are sent become NaN.

    Parameters
    ----------
    share : float
        Above 0, at most 1; at least one value is sent.
    feedback, seed
        See `Compressor`.

    References
    ----------
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, section 2.
    """
    share = number("random_k", "share", share, above=0, at_most=1)

    def chosen(size: int, context: Context) -> np.ndarray:
        return context.shared_random.choice(size, _count(share, size), replace=False, shuffle=False)

    def compress(x: np.ndarray, context: Context) -> Parts:
        return (x[chosen(x.size, context)],)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        factor = 1 if feedback else out.size / _count(share, out.size)
        # A little less than what becomes infinite, as the product is rounded.
        values = bounded(parts[0], float(np.finfo(out.dtype).max) / factor * (1 - 1e-6))
        out[chosen(out.size, context)] += values * out.dtype.type(factor)

    return Compressor(compress, restore, feedback=feedback, adds=True, seed=seed)


def _count(share: float, size: int) -> int:
    """How many of `size` values are sent."""
    return min(max(math.ceil(share * size), 1), size)

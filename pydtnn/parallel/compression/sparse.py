"""Compression of gradients to a subset of the values, unchanged."""

from __future__ import annotations

import math

import numpy as np

from pydtnn.parallel.compression.compressor import Compressor, Context, Parts
from pydtnn.parallel.compression.floats import bounded
from pydtnn.utils.validate import check_float, check_int


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
    return Compressor(lambda x, _: _largest(x, share), _scatter, feedback=feedback, seed=seed)


def dgc(*, share: float = 0.001, momentum: float = 0.9, warm_up: int = 0) -> Compressor:
    """Deep gradient compression: send the largest sums of each rank's momentum.

    ``u <- m u + g``; ``x <- x + u``; the `share` of x with the largest ``|x|`` is sent, where x and
    u start again from 0. Momentum is thus that of values not sent yet, which an optimizer's
    momentum of the values received is not: use one without, such as SGD. The paper clips each
    rank's gradients; with `clip_norm` the sums are.

    Parameters
    ----------
    share : float
        Fraction of values that are sent, in (0, 1]; at least one of each bucket.
    momentum : float
        m, in [0, 1).
    warm_up : int
        Steps after which the share falls from 1/4 to 1/16, from there to 1/64 and so on until it is
        `share`; the paper's is an epoch. 0: none.

    References
    ----------
    Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
    Training", ICLR 2018, sections 3.2 and 3.3 without clipping.
    """
    share = check_float("dgc", "share", share, above=0, at_most=1)
    warm_up = check_int("dgc", "warm_up", warm_up, at_least=0)

    def compress(x: np.ndarray, context: Context) -> Parts:
        first = 0.25 ** (1 + context.step // warm_up) if warm_up else 0.0
        return _largest(x, max(share, first))

    return Compressor(compress, _scatter, feedback=True, momentum=momentum, varies=warm_up > 0)


def _largest(x: np.ndarray, share: float) -> Parts:
    """Return the indices and values of the largest ``|x|``."""
    rest = x.size - _count(share, x.size)
    kept = np.argpartition(np.abs(x), rest)[rest:].astype(np.uint32)
    return kept, x[kept]


def _scatter(parts: Parts, out: np.ndarray, context: Context) -> None:
    """Add values at indices."""
    kept, values = parts
    out[kept] += values


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

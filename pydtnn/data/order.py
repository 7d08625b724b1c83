"""Which samples come when, and which rank reads them: functions without a state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pydtnn.kernels.reference.random import bits, stream


def permutation(seed: int, epoch: int, n: int, name: str = "order") -> NDArray[np.int64]:
    """Shuffle ``0..n-1``: sort by 64 random bits, keyed by (seed, name, epoch, sample).

    Every rank computes the same permutation by itself, whatever the number of ranks, and whatever
    NumPy's version: NumPy's own generators may change their streams from one version to the next.
    """
    words = bits(seed, stream(name), epoch, np.arange(n), 2).astype(np.uint64)
    return np.argsort(words[:, 0] << np.uint64(32) | words[:, 1], kind="stable")


def rank_slice(n: int, rank: int, size: int) -> slice:
    """Rows of `rank` where `n` rows are cut into `size` runs whose lengths differ by at most 1.

    >>> [rank_slice(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    each, left = divmod(n, size)
    start = rank * each + min(rank, left)
    return slice(start, start + each + (rank < left))


def below(words: NDArray[np.uint32], n: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn random 32-bit words into integers of ``0..n-1``: the upper half of a 64-bit product."""
    return (words.astype(np.uint64) * np.asarray(n, np.uint64) >> np.uint64(32)).astype(np.int64)

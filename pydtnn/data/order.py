"""Which samples come when, and which rank reads them: functions without a state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.kernels.reference.random import bits, stream
from pydtnn.utils.split import even_cut


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
    return slice(even_cut(n, size, rank), even_cut(n, size, rank + 1))


class Shard(NamedTuple):
    """One of the slices into which a batch is cut, and where a rank finds it among its own rows.

    A rank without any has rows of no number, and of no sample.
    """

    number: int | None
    rows: slice


def own_shards(n: int, shards: int, rank: int, size: int) -> tuple[slice, tuple[Shard, ...]]:
    """Cut `n` rows into shards, which depend on no number of ranks, and deal these out in runs.

    Parameters
    ----------
    n : int
    shards : int
        At least `size`; those that get no row come last and are left out.
    rank, size : int

    Returns
    -------
    rows : slice
        What the rank owns of the `n` rows.
    shards : tuple of Shard
        In order; empty where `rows` is.

    >>> rows, (first, second) = own_shards(10, 4, 1, 2)
    >>> rows, second
    (slice(6, 10, None), Shard(number=3, rows=slice(2, 4, None)))
    """
    mine = rank_slice(shards, rank, size)
    start, stop = even_cut(n, shards, mine.start), even_cut(n, shards, mine.stop)
    present = range(mine.start, min(mine.stop, n))  # each of the first n shards has a row
    cuts = ((number, rank_slice(n, number, shards)) for number in present)
    return slice(start, stop), tuple(
        Shard(number, slice(cut.start - start, cut.stop - start)) for number, cut in cuts
    )


def below(words: NDArray[np.uint32], n: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn random 32-bit words into integers of ``0..n-1``: the upper half of a 64-bit product."""
    return (words.astype(np.uint64) * np.asarray(n, np.uint64) >> np.uint64(32)).astype(np.int64)

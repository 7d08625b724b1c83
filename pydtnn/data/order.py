"""Order of the samples and their distribution over ranks: stateless functions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.kernels.reference.random import bits, stream
from pydtnn.utils.split import even_cut, even_cuts
from pydtnn.utils.validate import plain_array


def permutation(seed: int, epoch: int, n: int, name: str = "order") -> NDArray[np.int64]:
    """Shuffle ``0..n-1``: sort by 64 random bits, keyed by (seed, name, epoch, sample).

    Every rank computes the same permutation for any number of ranks and any NumPy version: NumPy's
    generators may change their streams between versions.
    """
    return np.argsort(order_keys(seed, epoch, n, name), kind="stable")


def split(n: int, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide ``0..n-1`` at random into the others and a fraction, both sorted and not empty."""
    held = min(max(round(fraction * n), 1), n - 1)
    order = permutation(seed, 0, n, "validation")
    return np.sort(order[held:]), np.sort(order[:held])


def order_keys(seed: int, epoch: int, n: int, name: str) -> NDArray[np.uint64]:
    """Return 64 random bits of each sample, keyed by (seed, name, epoch, sample)."""
    words = bits(seed, stream(name), epoch, np.arange(n), 2).astype(np.uint64)
    return words[:, 0] << np.uint64(32) | words[:, 1]


def rank_slice(n: int, rank: int, size: int) -> slice:
    """Rows of `rank`, with `n` rows divided into `size` ranges of nearly equal length.

    >>> [rank_slice(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return slice(even_cut(n, size, rank), even_cut(n, size, rank + 1))


class Shard(NamedTuple):
    """One of the slices of a batch, with its position among the rows of a rank.

    A rank without shards has one with number None and no rows.
    """

    number: int | None
    rows: slice


def assign_shards(n: int, shards: int, rank: int, size: int) -> tuple[slice, tuple[Shard, ...]]:
    """Divide `n` rows into shards, independent of ranks, and assign consecutive shards to ranks.

    Parameters
    ----------
    n : int
    shards : int
        At least `size`; empty shards come last and are omitted.
    rank, size : int

    Returns
    -------
    rows : slice
        The rank's range of the `n` rows.
    shards : tuple of Shard
        In order; empty if `rows` is.

    >>> rows, (first, second) = assign_shards(10, 4, 1, 2)
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


def max_shards(n: int, shards: int, size: int) -> int:
    """Return the most shards with rows that a rank has; see `assign_shards`.

    >>> max_shards(10, 4, 3), max_shards(1, 4, 3)
    (2, 1)
    """
    return max(min(stop, n) - min(start, n) for start, stop in pairwise(even_cuts(shards, size)))


def below(words: NDArray[np.uint32], n: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Map random 32-bit words to integers in ``0..n-1``: the upper half of a 64-bit product."""
    return (words.astype(np.uint64) * np.asarray(n, np.uint64) >> np.uint64(32)).astype(np.int64)


def as_indices(who: str, indices: Any, n: int) -> NDArray[np.int64]:
    """Return the indices of samples, or those that a mask of booleans selects.

    Parameters
    ----------
    who : str
        First word of error messages.
    indices : array of int, or of bool, shape ``(n,)``
    n : int
        Samples of the data set.

    Raises
    ------
    TypeError
        If they are something else, such as floats, or a mask of another length.

    >>> as_indices("Subset", [False, True, True], 3)
    array([1, 2])
    """
    chosen = plain_array(who, "indices", indices)
    if chosen.dtype == bool and chosen.shape == (n,):
        return np.flatnonzero(chosen)
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise TypeError(
            f"{who}: indices must be a list of whole numbers, or a mask of {n} booleans, got "
            f"{chosen.dtype} of shape {chosen.shape}"
        )
    return chosen.astype(np.int64)

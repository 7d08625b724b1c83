"""Which keys each query attends to: an interval of positions.

Causal order, windows, lengths of samples and documents of packed sequences are of this form. So
kernels take one array, ``(N or 1, T1, 2)`` of int64: a query attends to the keys from the first
number on, as far as before the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array


def positions_seen(queries: int, keys: int, causal: bool, window: int | None) -> np.ndarray:
    """Return the intervals (1, T1, 2) of a sequence without padding, where queries begin at 0.

    With a window, a query sees the keys at distances below it.
    """
    at = np.arange(queries)
    reach = keys + queries if window is None else window
    ends = at + 1 if causal else at + reach
    return np.stack([at - reach + 1, ends], axis=-1).clip(0, keys)[None]


def documents(ids: np.ndarray) -> np.ndarray:
    """Return the intervals (N, T, 2) of queries that see their own document.

    Parameters
    ----------
    ids : ndarray of int64, shape (N, T)
        Document of each position, 0 where there is none.

    Raises
    ------
    ValueError
        If positions of a document are not next to each other: with row and id.
    """
    n, length = ids.shape
    at, edge = np.arange(length), np.ones((n, 1), bool)
    changes = ids[:, 1:] != ids[:, :-1]
    begins = np.concatenate([edge, changes], axis=1)
    ends = np.concatenate([changes, edge], axis=1)
    numbers = np.sort(np.where(begins & (ids > 0), ids, -1 - at), axis=1)
    repeated = numbers[:, 1:] == numbers[:, :-1]
    if repeated.any():
        row, place = (int(i) for i in np.argwhere(repeated)[0])
        raise ValueError(
            f"positions of document {int(numbers[row, place])} of row {row} of the batch are not "
            "next to each other"
        )
    first = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    end = np.minimum.accumulate(np.where(ends, at + 1, length)[:, ::-1], axis=1)[:, ::-1]
    return np.stack([first, np.where(ids > 0, end, first)], axis=-1)


def first_positions(xp: Any, lengths: Array, positions: int, all_queries: bool) -> Array:
    """Return the intervals (N, T1, 2) of samples of which only the first positions exist.

    Queries behind the length see no key, unless `all_queries` exist.
    """
    ends = xp.broadcast_to(lengths[:, None], (len(lengths), positions))
    if not all_queries:
        ends = xp.where(xp.arange(positions) < ends, ends, 0)
    return xp.stack([xp.zeros_like(ends), ends], axis=-1)


def both(xp: Any, seen: Array | None, other: Array | None) -> Array | None:
    """Return the intersections of two sets of intervals; None is all keys."""
    if seen is None or other is None:
        return other if seen is None else seen
    first = xp.maximum(seen[..., 0], other[..., 0])
    return xp.stack([first, xp.maximum(first, xp.minimum(seen[..., 1], other[..., 1]))], axis=-1)

"""Even partitions, such as of samples over ranks or of an array over the ranks that reduce it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def even_cut(n: int, pieces: int, piece: int) -> int:
    """Return the start of piece `piece`, see `even_cuts`; ``even_cut(n, pieces, pieces)`` is n.

    >>> [even_cut(5, 3, piece) for piece in range(4)]
    [0, 2, 4, 5]
    """
    each, left = divmod(n, pieces)
    return piece * each + min(piece, left)


def even_cuts(n: int, pieces: int) -> list[int]:
    """Return the boundaries of `pieces` pieces of `n` items; lengths differ by at most 1.

    Longer pieces come first.

    >>> even_cuts(5, 3)
    [0, 2, 4, 5]
    """
    return [even_cut(n, pieces, piece) for piece in range(pieces + 1)]


def balanced_counts(
    n: int, times: Sequence[tuple[float, float]], least: int, most: int
) -> list[int]:
    """Divide `n` items so that the longest time of a part is as short as possible.

    Parameters
    ----------
    n : int
        Items, between ``least * len(times)`` and ``most * len(times)``.
    times : sequence of (float, float)
        Of each part, the time that it takes in any case, and that of an item.
    least, most : int
        Items of each part.

    Examples
    --------
    >>> balanced_counts(64, [(0, 1.0), (0, 1.0), (0, 1.0), (0, 2.0)], 4, 32)
    [19, 18, 18, 9]
    """
    counts = [least] * len(times)
    ends = [(fixed + each * (least + 1), part) for part, (fixed, each) in enumerate(times)]
    heapq.heapify(ends)
    for _ in range(n - sum(counts)):
        _, part = heapq.heappop(ends)
        counts[part] += 1
        if counts[part] < most:
            fixed, each = times[part]
            heapq.heappush(ends, (fixed + each * (counts[part] + 1), part))
    return counts


def proportional_cut(n: int, counts: Sequence[int], part: int) -> int:
    """Return the start of a part of `n` items, whose lengths are in proportion to counts.

    >>> [proportional_cut(7, [2, 1, 1], part) for part in range(4)]
    [0, 3, 5, 7]
    """
    return n * sum(counts[:part]) // sum(counts)

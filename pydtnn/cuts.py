"""How things are dealt out evenly: samples to ranks, parts of an array to those who add them up."""

from __future__ import annotations


def even_cuts(n: int, pieces: int) -> list[int]:
    """Where `n` things are cut into runs whose lengths differ by at most 1, longer ones first.

    >>> even_cuts(5, 3)
    [0, 2, 4, 5]
    """
    each, left = divmod(n, pieces)
    return [piece * each + min(piece, left) for piece in range(pieces + 1)]

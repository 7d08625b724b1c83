"""How things are dealt out evenly: samples to ranks, parts of an array to those who add them up."""

from __future__ import annotations


def even_cut(n: int, pieces: int, piece: int) -> int:
    """Where piece number `piece` begins, see `even_cuts`; ``even_cut(n, pieces, pieces)`` is n.

    >>> [even_cut(5, 3, piece) for piece in range(4)]
    [0, 2, 4, 5]
    """
    each, left = divmod(n, pieces)
    return piece * each + min(piece, left)


def even_cuts(n: int, pieces: int) -> list[int]:
    """Where `n` things are cut into runs whose lengths differ by at most 1, longer ones first.

    >>> even_cuts(5, 3)
    [0, 2, 4, 5]
    """
    return [even_cut(n, pieces, piece) for piece in range(pieces + 1)]

"""Even partitions, such as of samples over ranks or of an array over the ranks that reduce it."""

from __future__ import annotations


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

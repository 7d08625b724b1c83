"""Grids of our kernels: from the shapes alone, so that results are the same on every GPU."""

from __future__ import annotations

from typing import NamedTuple

THREADS, WARP = 256, 32
"""Threads of every block, and of a warp."""

MOST_PARTS = 512
"""Blocks of a kernel that sums, at most: enough to keep a large GPU busy, few to add up."""

ROWS, SUMMED_ROWS = 8, 16
"""Rows that a thread takes: of a map, and at least of a sum."""

LONG_ROW = 1024
"""Elements of a row from which on a whole block works on it."""


class Columns(NamedTuple):
    """How a kernel of columns.cuh covers an array (rows, channels).

    Parameters
    ----------
    grid, block : tuple of int
        Parts of the rows and of the channels; threads side by side and one below the other.
    part_rows : int
        Rows of a part.
    width : int
        Channels of a block.
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    part_rows: int
    width: int

    def partial(self, sums: int) -> int:
        """Doubles in which the blocks leave so many sums per channel."""
        return self.grid[0] * self.grid[1] * self.width * sums


def columns(rows: int, channels: int, each: int, *, summed: bool) -> Columns:
    """Lay a kernel out.

    Parameters
    ----------
    rows, channels : int
    each : int
        Channels of a thread; divides `channels`.
    summed : bool
        Whether the rows are added up. Their parts are then limited.
    """
    across = min(WARP, 1 << max(channels // each - 1, 0).bit_length())
    down, blocks = THREADS // across, max(ceil(channels, across * each), 1)
    parts = ceil(rows, down * (SUMMED_ROWS if summed else ROWS))
    if summed:
        parts = min(parts, max(MOST_PARTS // blocks, 1))
    part_rows = ceil(ceil(rows, max(parts, 1)), down) * down
    grid = (max(ceil(rows, max(part_rows, 1)), 1), blocks)
    return Columns(grid, (across, down), part_rows, across * each)


def flat(elements: int, each: int, flight: int) -> int:
    """Blocks whose threads take `flight` vectors of `each` elements."""
    return max(ceil(elements, THREADS * each * flight), 1)


def team(columns: int) -> tuple[str, int]:
    """Who works on a row of so many elements: the name in kernels, and how many fit a block."""
    return ("warp", THREADS // WARP) if columns <= LONG_ROW else ("block", 1)


def ceil(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)

"""Grids of our kernels: from the shapes alone, so that results are the same on every GPU.

What was decided, and why
-------------------------
All of these kernels wait for memory and for nothing else, if they are let. An H200 moves 4.8 TB/s
and a load takes about 1 us, so about 5 MB must be under way at any time: 40 KB on each of 132 SMs.

- *16 bytes at a time.* A thread loads and stores 4 float32, 8 elements of 16 bits or 2 float64 with
  one instruction; a warp's 512 bytes are then four whole lines of 128. Where channels, sizes or
  addresses do not allow it, the same kernel takes single elements.
- *Several loads under way.* A thread issues 2 to 8 loads, 32 to 128 bytes, before it uses the
  first. They are kept as they came: 16-bit elements are widened when they are used, so that 16
  bytes take four registers and not eight.
- *Registers set the number of threads.* Kernels that sum have three blocks of 256 on an SM, 80
  registers for a thread; those that hold a row have two, 128 registers. Per-channel coefficients of
  deferred arrays and the second level of the sums are in shared memory for that reason. With
  3 x 256 threads of 64 bytes, 48 KB are under way.
- *Sums in one wave.* A kernel that sums has at most `MAX_PARTS` blocks, which all run at once and
  do equal work: a second wave of a few blocks would cost as much time as the first. The sums of
  sixteen blocks are added up by the last of them, and so again: no block reads all.
- *Maps in many waves.* A map has many blocks of 4 to 16 rows per thread, whose ends do not
  coincide.
- *No division per element.* Positions of a thread follow from those before by additions. What is
  divided is divided once per thread, by 32 bits where the size allows it.
- *Rows are read once.* Softmax, cross-entropy, layer and group norm keep a row in the registers of
  a warp, or of a block where it has more than `WARP` x `HELD` vectors.

On an H100 maps reach 90 to 100 % of the bandwidth of a copy, sums over 256 MB 84 to 91 %. Sums over
small arrays, 2 to 8 MB, take 11 to 22 us, of which about 9 are for the two meetings of blocks. More
and narrower blocks (2 rows a thread, 16 channels) with one meeting were tried there, and took 14.1
us where these take 11.7. `tests/kernels/cuda/test_compile.py` holds what the compiler makes of the
kernels to the figures above, `benchmarks/gpu/kernels.py` measures.
"""

from __future__ import annotations

from typing import NamedTuple

THREADS, WARP = 256, 32
"""Threads of every block, and of a warp."""

MAX_BLOCKS = 65535
"""Blocks along the second axis of a grid."""

MAX_PARTS = 384
"""Blocks of a kernel that sums, at most: three on each of 128 SMs, few enough to add up."""

MAX_TEAMS = 256
"""Blocks of a kernel that sums over rows it holds: two on each SM."""

MANY_BLOCKS = 2048
"""Blocks of a map, from which on its threads take more rows."""

ROWS, MAX_ROWS, SUMMED_ROWS = 4, 16, 8
"""Rows that a thread takes: of a map at least and at most, and of a sum at least."""

MAX_VECTORS = 1 << 28
"""Of a row that a team holds: their elements are counted in 32 bits."""

HELD = 8
"""Vectors of a row that a thread keeps in registers, shared by all arrays: as in runs.cuh."""


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

    Raises
    ------
    ValueError
        For more channels than the second axis of a grid has blocks for: about two million.
    """
    if channels > MAX_BLOCKS * WARP:
        raise ValueError(
            f"cuda: an array has {channels} channels, and our kernels take at most "
            f"{MAX_BLOCKS * WARP}; use --device cpu."
        )
    across = min(WARP, 1 << max(channels // each - 1, 0).bit_length())
    down, blocks = THREADS // across, max(ceil(channels, across * each), 1)
    if summed:
        parts = min(ceil(rows, down * SUMMED_ROWS), max(MAX_PARTS // blocks, 1))
    else:
        taken = ceil(rows, down * max(MANY_BLOCKS // blocks, 1))
        parts = ceil(rows, down * min(max(taken, ROWS), MAX_ROWS))
    part_rows = ceil(ceil(rows, max(parts, 1)), down) * down
    grid = (max(ceil(rows, max(part_rows, 1)), 1), blocks)
    return Columns(grid, (across, down), part_rows, across * each)


def flat(elements: int, each: int, flight: int) -> int:
    """Blocks whose threads take `flight` vectors of `each` elements."""
    return max(ceil(elements, THREADS * each * flight), 1)


def team(vectors: int, arrays: int = 1) -> tuple[str, int]:
    """Who works on a row of so many vectors, of so many arrays at once.

    Returns
    -------
    tuple of (str, int)
        The name in kernels, and how many fit a block.

    Raises
    ------
    ValueError
        For rows that cannot be counted in 32 bits.
    """
    if vectors > MAX_VECTORS:
        raise ValueError(
            f"cuda: a row has {vectors} vectors, and our kernels take at most {MAX_VECTORS}; "
            "use --device cpu."
        )
    return ("warp", THREADS // WARP) if vectors <= WARP * HELD // arrays else ("block", 1)


def ceil(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)

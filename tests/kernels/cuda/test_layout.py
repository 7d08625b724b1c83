"""Grids of our CUDA kernels: every row and channel once, within the limits of GPUs."""

from __future__ import annotations

import pytest

from pydtnn.kernels.cuda.layout import MOST_PARTS, THREADS, columns

SHAPES = [(0, 4), (1, 1), (7, 3), (255, 64), (100_000, 16), (3, 5000), (10**7, 1), (12, 10**6)]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_columns_cover_every_row_and_channel_and_no_block_is_idle(
    rows: int, channels: int, summed: bool
) -> None:
    for each in {1, 4 if channels % 4 == 0 else 1}:
        layout = columns(rows, channels, each, summed=summed)
        (parts, blocks), (across, down) = layout.grid, layout.block
        assert across * down == THREADS
        assert layout.width == across * each
        assert (blocks - 1) * layout.width < channels <= blocks * layout.width
        assert parts * layout.part_rows >= rows
        assert (parts - 1) * layout.part_rows < max(rows, 1)


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_sums_have_a_counter_for_each_column_of_blocks_that_needs_one(
    rows: int, channels: int
) -> None:
    layout = columns(rows, channels, 1, summed=True)
    assert layout.grid[0] == 1 or layout.grid[1] <= MOST_PARTS
    assert layout.partial(3) == 3 * layout.width * layout.grid[0] * layout.grid[1]


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_grids_are_within_the_limits_of_gpus(rows: int, channels: int) -> None:
    for summed in (False, True):
        parts, blocks = columns(rows, channels, 1, summed=summed).grid
        assert parts < 2**31
        assert blocks < 2**16

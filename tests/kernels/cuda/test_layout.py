"""Grids of our CUDA kernels: every row and channel once, within the limits of GPUs."""

import re

import pytest

from pydtnn.kernels.cuda import elementwise, random, update
from pydtnn.kernels.cuda.layout import (
    HELD,
    MAX_BLOCKS,
    MAX_PARTS,
    MAX_ROWS,
    MAX_VECTORS,
    ROWS,
    THREADS,
    WARP,
    ceil,
    columns,
    team,
)
from pydtnn.kernels.cuda.module import SOURCES
from tests.each import each

SHAPES = [(0, 4), (1, 1), (7, 3), (255, 64), (100_000, 16), (3, 5000), (10**7, 1), (12, 10**6)]


@each("summed", [False, True])
@each("rows, channels", SHAPES)
def test_columns_cover_every_row_and_channel_and_no_block_is_idle(rows, channels, summed):
    for lanes in {1, 4 if channels % 4 == 0 else 1}:
        layout = columns(rows, channels, lanes, summed=summed)
        (parts, blocks), (across, down) = layout.grid, layout.block
        assert across * down == THREADS
        assert layout.width == across * lanes
        assert (blocks - 1) * layout.width < channels <= blocks * layout.width
        assert parts * layout.part_rows >= rows
        assert (parts - 1) * layout.part_rows < max(rows, 1)
        assert parts < 2**31
        assert blocks < 2**16


@pytest.mark.parametrize("rows", [0, 1, 100, 5000, 10**5, 10**7])
def test_sums_have_a_counter_for_each_group_of_blocks_and_run_all_at_once(rows):
    found = re.search(r"\bGROUP = (\d+)", (SOURCES / "columns.cuh").read_text())
    assert found
    group = int(found[1])
    for channels in (1, 3, 64, 100, 1000, 5000, 20_000, 100_000):
        for lanes in (1, 4):
            layout = columns(rows, channels, lanes, summed=True)
            parts, blocks = layout.grid
            groups = ceil(parts, group)
            counters = blocks * (groups + 1 if groups > 1 else 1)
            assert parts == 1 or counters <= MAX_PARTS
            assert parts == 1 or parts * blocks <= MAX_PARTS
            assert layout.partial(3) == 3 * layout.width * parts * blocks


def test_constants_are_those_of_the_sources():
    for name, value, file in (("THREADS", THREADS, "element.cuh"), ("WARP", WARP, "element.cuh")):
        assert re.search(rf"\b{name} = {value}\b", (SOURCES / file).read_text())
    for file, value in (
        ("elementwise.cu", elementwise.FLIGHT),
        ("convert.cu", elementwise.FLIGHT),
        ("random.cu", random.FLIGHT),
    ):
        assert f"enum {{ FLIGHT = {value} }};" in (SOURCES / file).read_text()
    assert f"{HELD} / INPUTS" in (SOURCES / "runs.cuh").read_text()
    assert f"map_elements<R, N, {update.FLIGHT}>" in (SOURCES / "update.cu").read_text()


def test_small_maps_have_many_blocks_and_large_ones_many_rows_per_thread():
    small, large = (columns(rows, 64, 4, summed=False) for rows in (2**11, 2**20))
    assert small.part_rows == ROWS * small.block[1]
    assert large.part_rows == MAX_ROWS * large.block[1]
    assert team(WARP * HELD) == ("warp", THREADS // WARP)  # whose registers hold them
    assert team(WARP * HELD + 1) == ("block", 1)
    assert team(WARP * HELD // 2 + 1, 2) == ("block", 1)


def test_sizes_that_kernels_cannot_count_are_refused():
    channels = MAX_BLOCKS * WARP
    for lanes in (1, 4):
        assert columns(3, channels, lanes, summed=True).grid[1] <= MAX_BLOCKS
        with pytest.raises(ValueError, match=f"has {channels + 4} channels.* at most {channels}"):
            columns(3, channels + 4, lanes, summed=False)
    assert team(MAX_VECTORS) == ("block", 1)
    with pytest.raises(ValueError, match=f"a row has {MAX_VECTORS + 1} vectors"):
        team(MAX_VECTORS + 1)

"""Geometries of convolutions: awkward sizes, and those at which algorithms walk in other ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cpu.conv import candidates


def geometry(
    size: tuple[int, ...],
    channels: int,
    filters: int,
    kernel: tuple[int, ...],
    stride: int = 1,
    padding: Any = 0,
    dilation: int = 1,
    groups: int = 1,
) -> ConvGeometry:
    """Shorthand: equal strides and dilations; padding is a number or pairs."""
    axes = len(size)
    pairs = ((padding, padding),) * axes if isinstance(padding, int) else padding
    return ConvGeometry(
        size, kernel, (stride,) * axes, pairs, (dilation,) * axes, channels, filters, groups
    )


def depthwise(size: tuple[int, ...], channels: int, *others: Any) -> ConvGeometry:
    """As `geometry`, with as many filters and groups as channels."""
    return replace(geometry(size, channels, channels, *others), groups=channels)


AWKWARD = {
    "one of everything": (1, geometry((1, 1), 1, 1, (1, 1))),
    "no image": (0, geometry((8, 8), 5, 7, (3, 3), padding=1)),
    "first layer": (3, geometry((32, 32), 3, 16, (3, 3), padding=1)),
    "first layer, 7 by 7, stride 2": (2, geometry((23, 21), 3, 64, (7, 7), 2, 3)),
    "one channel": (2, geometry((9, 11), 1, 32, (3, 3), padding=1)),
    "16 filters": (2, geometry((32, 32), 16, 16, (3, 3), padding=1)),
    "several images to a block": (21, geometry((8, 8), 64, 64, (3, 3), padding=1)),
    "rows of a large image": (2, geometry((91, 67), 5, 9, (3, 3), padding=1)),
    "a row larger than the cache": (1, geometry((5, 1999), 40, 3, (3, 3), padding=1)),
    "primes": (5, geometry((13, 11), 7, 19, (3, 5), padding=((1, 2), (0, 3)))),
    "three vectors of filters": (2, geometry((9, 9), 17, 53, (3, 3), padding=1)),
    "pointwise": (3, geometry((7, 9), 33, 41, (1, 1))),
    "pointwise, padding at the end": (3, geometry((55,), 27, 5, (1,), padding=((0, 1),))),
    "pointwise, stride 2": (3, geometry((7, 9), 16, 32, (1, 1), stride=2)),
    "pointwise, 65 channels": (7, geometry((7, 9), 65, 70, (1, 1))),
    "64 channels, 200 filters": (2, geometry((13, 17), 64, 200, (1, 3), padding=((0, 0), (1, 1)))),
    "67 channels, stride 2": (3, geometry((11, 9), 67, 71, (3, 2), 2, ((1, 0), (0, 1)))),
    "stride 2": (3, geometry((16, 16), 16, 32, (3, 3), stride=2, padding=1)),
    "stride 2, odd size, asymmetric": (2, geometry((15, 17), 6, 10, (3, 3), 2, ((0, 1), (1, 0)))),
    "stride 3 beyond the kernel": (2, geometry((17, 16), 5, 6, (2, 2), stride=3)),
    "stride 3, kernel 7": (2, geometry((23, 29), 3, 18, (7, 7), stride=3, padding=3)),
    "rows that nothing reads": (2, geometry((10, 11), 4, 5, (3, 3), stride=4)),
    "dilation 2": (2, geometry((12, 13), 16, 20, (3, 3), padding=2, dilation=2)),
    "dilation 2, stride 2": (2, geometry((13, 14), 5, 6, (3, 3), 2, 2, 2)),
    "dilation 2, stride 3": (2, geometry((19, 14), 5, 6, (4, 3), 3, 1, 2)),
    "even kernel": (2, geometry((9, 8), 8, 8, (2, 2), padding=((1, 0), (0, 1)))),
    "4 by 3": (2, geometry((9, 8), 8, 24, (4, 3), padding=((2, 1), (1, 1)))),
    "kernel as large as the image": (4, geometry((5, 5), 6, 11, (5, 5))),
    "padding beyond the kernel": (2, geometry((4, 4), 3, 4, (2, 2), padding=3)),
    "three groups": (2, geometry((9, 10), 12, 21, (3, 3), padding=1, groups=3)),
    "groups of one vector": (2, geometry((9, 10), 48, 48, (3, 3), padding=1, groups=3)),
    "one vector, two columns of padding": (2, geometry((7, 6), 16, 16, (3, 3), padding=2)),
    "groups of whole vectors": (2, geometry((9, 10), 64, 64, (3, 3), 2, 1, groups=2)),
    "groups, dilation 2": (2, geometry((9, 10), 10, 20, (3, 3), 1, 2, 2, groups=5)),
    "depthwise": (3, depthwise((9, 10), 37, (3, 3), 1, 1)),
    "depthwise, 16 channels, no padding": (3, depthwise((9, 10), 16, (3, 3))),
    "depthwise, stride 2, 5 by 5": (3, depthwise((11, 10), 21, (5, 5), 2, 2)),
    "depthwise, dilation 2": (3, depthwise((11, 10), 33, (3, 3), 1, 2, 2)),
    "depthwise, no image": (0, depthwise((9, 10), 20, (3, 3), 1, 1)),
    "depthwise, a single row": (3, depthwise((1, 13), 5, (3, 3), 1, 1)),
    "depthwise, a single column": (3, depthwise((7, 1), 17, (3, 3), 1, 1)),
    "depthwise, 2 by 3": (5, depthwise((2, 3), 40, (3, 3), 1, 1)),
    "depthwise, 7 by 7": (9, depthwise((7, 7), 71, (3, 3), 1, 1)),
    "depthwise, stride 2, even": (3, depthwise((14, 16), 35, (3, 3), 2, 1)),
    "depthwise, stride 2, odd": (3, depthwise((13, 15), 33, (3, 3), 2, 1)),
    "depthwise, padding at the end": (2, depthwise((16, 12), 18, (3, 3), 2, ((0, 1), (0, 1)))),
    "depthwise, 5 by 5": (3, depthwise((11, 17), 19, (5, 5), 1, 2)),
    "depthwise, 7 by 4": (2, depthwise((9, 19), 6, (7, 4), 1, ((3, 3), (2, 1)))),
    "depthwise, stride 3 beyond the kernel": (2, depthwise((17, 16), 9, (2, 2), 3)),
    "depthwise, dilation 2, stride 3": (2, depthwise((19, 14), 5, (4, 3), 3, 1, 2)),
    "depthwise, padding beyond the kernel": (2, depthwise((4, 4), 7, (2, 2), 1, 3)),
    "depthwise, rows of a large image": (1, depthwise((61, 59), 160, (3, 3), 1, 1)),
    "depthwise, rows of a large image, stride 2": (1, depthwise((61, 58), 160, (3, 3), 2, 1)),
    "depthwise, rows larger than a block": (1, depthwise((3, 2003), 133, (3, 3), 1, 1)),
    "depthwise, one axis": (3, depthwise((50,), 9, (3,), 2, 1)),
    "depthwise, two filters a channel": (3, geometry((9, 10), 9, 18, (3, 3), 1, 1, groups=9)),
    "one axis": (3, geometry((50,), 6, 9, (5,), stride=2, padding=((1, 2),))),
    "three axes": (2, geometry((4, 5, 6), 3, 4, (3, 2, 3), padding=1)),
}
"""Without what follows: Winograd's algorithms at sizes of their own, and volumes."""

SIZES = {
    "a map smaller than a tile": (5, geometry((1, 3), 16, 16, (3, 3), padding=1)),
    "one output": (3, geometry((3, 3), 5, 6, (3, 3))),
    "tiles of several images": (21, geometry((2, 2), 24, 40, (3, 3), padding=1)),
    "partial tiles on both sides": (3, geometry((7, 9), 32, 16, (3, 3), padding=1)),
    "padding on one side": (2, geometry((6, 7), 8, 16, (3, 3), padding=((2, 0), (0, 2)))),
    "outputs that see only zeros": (2, geometry((3, 4), 5, 16, (3, 3), padding=5)),
    "an output less in the last tiles": (2, geometry((3, 13), 8, 45, (3, 3), 1, ((2, 2), (3, 3)))),
    "slabs of a large image": (2, geometry((50, 70), 16, 24, (3, 3), padding=1)),
    "a row wider than a block": (1, geometry((6, 700), 16, 16, (3, 3), padding=1)),
    "ranges of inputs": (2, geometry((8, 9), 210, 120, (3, 3), padding=1)),
    "ranges of outputs": (3, geometry((5, 6), 67, 390, (3, 3), padding=1)),
    "ranges of both, and slabs": (1, geometry((33, 40), 180, 170, (3, 3), padding=1)),
}
STRIDED = {
    "phases of a map smaller than a tile": (5, geometry((2, 3), 16, 16, (3, 3), 2, 1)),
    "phases of one output": (3, geometry((3, 3), 5, 6, (3, 3), 2)),
    "phases of one pixel": (3, geometry((1, 1), 5, 6, (3, 3), 2, 1)),
    "phases of tiles of several images": (21, geometry((8, 8), 24, 40, (3, 3), 2, 1)),
    "phases, partial tiles": (3, geometry((19, 22), 32, 16, (3, 3), 2, 1)),
    "phases, padding on one side": (2, geometry((13, 15), 8, 16, (3, 3), 2, ((2, 0), (0, 1)))),
    "phases, even padding": (2, geometry((17, 16), 16, 20, (3, 3), 2, ((0, 1), (2, 2)))),
    "phases, outputs that see only zeros": (2, geometry((3, 4), 5, 16, (3, 3), 2, 5)),
    "phases of slabs": (2, geometry((50, 71), 16, 24, (3, 3), 2, 1)),
    "phases of a row wider than a block": (1, geometry((7, 700), 16, 16, (3, 3), 2, 1)),
    "phases, ranges of inputs": (2, geometry((16, 17), 210, 120, (3, 3), 2, 1)),
    "phases, ranges of outputs": (3, geometry((9, 11), 67, 390, (3, 3), 2, 1)),
    "phases, ranges of both, and slabs": (1, geometry((66, 75), 131, 170, (3, 3), 2, 1)),
    "phases, 20 channels": (2, geometry((15, 15), 20, 35, (3, 3), 2, 1)),
    "5 by 5": (3, geometry((19, 22), 19, 33, (5, 5), 2, 2)),
    "5 by 5, odd padding": (3, geometry((18, 21), 3, 16, (5, 5), 2, ((1, 2), (3, 0)))),
    "5 by 5, an output less": (2, geometry((4, 5), 38, 33, (5, 5), 2, ((3, 3), (1, 0)))),
    "7 by 7": (3, geometry((23, 30), 3, 64, (7, 7), 2, 3)),
    "7 by 7, even padding": (2, geometry((23, 18), 17, 20, (7, 7), 2, ((2, 2), (0, 4)))),
    "7 by 7, ranges of both": (2, geometry((26, 25), 90, 100, (7, 7), 2, 3)),
}
"""Convolutions of stride 2, whose phases are Winograd's."""

LINES = {
    "a row, one output": (3, geometry((1, 7), 5, 6, (1, 7))),
    "a row of one pixel": (3, geometry((1, 1), 5, 6, (1, 7), padding=((0, 0), (3, 3)))),
    "a column of one pixel": (3, geometry((1, 1), 9, 16, (7, 1), padding=((3, 3), (0, 0)))),
    "rows, partial tiles": (3, geometry((5, 13), 32, 16, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, partial tiles": (3, geometry((13, 5), 16, 24, (7, 1), padding=((3, 3), (0, 0)))),
    "rows of 17, an output less": (2, geometry((4, 17), 19, 45, (1, 7), padding=((0, 0), (3, 3)))),
    "columns of 17, an output less": (
        2,
        geometry((17, 4), 45, 19, (7, 1), padding=((3, 3), (0, 0))),
    ),
    "rows, padding on one side": (2, geometry((3, 11), 8, 16, (1, 7), padding=((1, 0), (0, 6)))),
    "columns, padding on one side": (2, geometry((11, 3), 8, 16, (7, 1), padding=((5, 0), (0, 2)))),
    "lines of outputs that see only zeros": (2, geometry((3, 4), 5, 16, (1, 3), padding=6)),
    "rows of 3 taps": (3, geometry((8, 8), 17, 33, (1, 3), padding=((0, 0), (1, 1)))),
    "columns of 3 taps": (21, geometry((7, 3), 33, 17, (3, 1), padding=((1, 1), (0, 0)))),
    "rows of 5 taps": (3, geometry((3, 18), 17, 33, (1, 5), padding=((0, 0), (2, 2)))),
    "columns of 5 taps": (3, geometry((9, 2), 16, 16, (5, 1), padding=((4, 0), (0, 0)))),
    "rows, slabs": (1, geometry((40, 61), 16, 24, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, slabs": (2, geometry((61, 40), 16, 24, (7, 1), padding=((3, 3), (0, 0)))),
    "rows, ranges of both": (1, geometry((3, 19), 220, 230, (1, 7), padding=((0, 0), (3, 3)))),
    "columns, ranges of both": (1, geometry((17, 3), 410, 390, (3, 1), padding=((1, 1), (0, 0)))),
}
"""Filters of one row or one column."""
PARTS = {
    "parts of a map smaller than a tile": (5, geometry((1, 3), 16, 16, (5, 5), padding=2)),
    "parts of one output": (3, geometry((5, 5), 5, 6, (5, 5))),
    "parts, partial tiles": (3, geometry((7, 18), 20, 35, (5, 5), padding=2)),
    "parts, padding on one side": (2, geometry((6, 7), 8, 16, (5, 5), padding=((4, 0), (0, 3)))),
    "parts of outputs that see only zeros": (2, geometry((3, 4), 5, 16, (5, 5), padding=9)),
    "parts of slabs": (2, geometry((50, 70), 16, 24, (5, 5), padding=2)),
    "parts, ranges of both": (1, geometry((9, 6), 140, 130, (5, 5), padding=2)),
}
"""Filters of 5x5, which are four parts of at most 3x3."""

VOLUMES = {
    "volume, one of everything": (1, geometry((1, 1, 1), 1, 1, (1, 1, 1))),
    "volume, no volume": (0, geometry((4, 5, 6), 3, 4, (3, 3, 3), padding=1)),
    "volume, first layer": (2, geometry((6, 9, 8), 4, 32, (3, 3, 3), padding=1)),
    "volume, even kernel": (2, geometry((5, 6, 7), 3, 5, (2, 2, 2), padding=((0, 1),) * 3)),
    "volume, primes": (3, geometry((7, 5, 11), 5, 19, (3, 5, 2), padding=((2, 0), (0, 3), (1, 1)))),
    "volume, pointwise": (2, geometry((3, 5, 4), 17, 33, (1, 1, 1))),
    "volume, taps along the depth only": (2, geometry((7, 3, 4), 6, 8, (5, 1, 1))),
    "volume, plane": (2, geometry((1, 8, 9), 16, 16, (1, 3, 3), padding=((0, 0), (1, 1), (1, 1)))),
    "volume, stride 2": (2, geometry((7, 8, 9), 6, 10, (3, 3, 3), 2, 1)),
    "volume, stride 3 beyond the kernel": (2, geometry((11, 8, 9), 4, 5, (2, 2, 2), 3)),
    "volume, depths that nothing reads": (2, geometry((10, 6, 5), 3, 4, (1, 2, 2), 4)),
    "volume, dilation 2": (2, geometry((8, 7, 9), 5, 6, (3, 2, 3), 1, 2, 2)),
    "volume, kernel as large as the volume": (3, geometry((4, 3, 5), 6, 7, (4, 3, 5))),
    "volume, padding beyond the kernel": (2, geometry((3, 2, 3), 3, 4, (2, 2, 2), padding=3)),
    "volume, three groups": (2, geometry((5, 6, 4), 12, 21, (3, 3, 3), padding=1, groups=3)),
    "volume, depthwise": (2, depthwise((5, 6, 4), 9, (3, 3, 3), 1, 1)),
    "volume, depthwise, one channel": (2, geometry((4, 5, 6), 1, 3, (3, 2, 3), padding=1)),
    "volume, depthwise, no volume": (0, depthwise((4, 5, 6), 3, (3, 3, 3), 1, 1)),
    "volume, filters of a channel": (2, geometry((5, 6, 7), 5, 15, (3, 3, 3), 1, 1, groups=5)),
    "volume, depthwise, stride 2": (2, depthwise((9, 8, 7), 17, (3, 3, 3), 2, 1)),
    "volume, depthwise, stride 3, even": (2, depthwise((11, 8, 9), 4, (2, 2, 2), 3)),
    "volume, depthwise, dilation": (2, depthwise((8, 7, 9), 6, (3, 2, 3), 2, 2, 2)),
    "volume, uneven": (3, depthwise((7, 5, 11), 19, (3, 5, 2), 1, ((2, 0), (0, 3), (1, 1)))),
    "volume, far padding": (2, depthwise((3, 2, 3), 4, (2, 2, 2), 1, 3)),
    "volume, one row": (2, geometry((6, 1, 7), 4, 5, (3, 1, 3), padding=((1, 1), (0, 0), (1, 1)))),
}

CASES = AWKWARD | SIZES | STRIDED | LINES | PARTS | VOLUMES
EVERY = [
    (case, algorithm)
    for case, (_, shape) in CASES.items()
    for algorithm in candidates(shape)[case not in AWKWARD | VOLUMES :]
]
"""Every case with every algorithm that suits it; geometries of Winograd's with these alone."""

"""Operations and bytes of the algorithms of convolutions, which perform fewer than the nominal."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cpu.conv import candidates


class Winograd(NamedTuple):
    """Operations of Winograd's algorithm, by tile.

    Attributes
    ----------
    tile : int
        Rows and columns of the output of a tile.
    products : int
        Multiplications along an axis for each channel and filter, of a tile with all outputs.
    data, filters, inverse : int
        Additions of the transforms of a tile of a channel, of a filter, and of a result.
    """

    tile: int
    products: int
    data: int
    filters: int
    inverse: int


WINOGRAD = {
    ("winograd2", 3): Winograd(2, 4, 32, 28, 24),
    ("winograd4", 3): Winograd(4, 6, 156, 72, 90),
    ("polyphase", 3): Winograd(4, 9, 400, 224, 108),
    ("polyphase", 5): Winograd(4, 11, 576, 288, 130),
    ("polyphase", 7): Winograd(3, 11, 576, 480, 90),
}
"""By name and taps along an axis. Of a stride of 1: Lavin and Gray, Fast algorithms for
convolutional neural networks, 2016, sections 4.1 and 4.3; of a stride of 2: as implemented in
`conv_winograd_points.h`, of all four phases."""


def work_of(geometry: ConvGeometry, batch: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Return the work of one pass (forward, dw or dx) by each algorithm of the CPU's kernels.

    Parameters
    ----------
    geometry : ConvGeometry
    batch : int
    itemsize : int
        Length of an element, in B.

    Yields
    ------
    flops : int
        Operations at the peak of multiply-adds; an addition of a transform counts twice, because it
        takes as long as a multiply-add.
    nbytes : int
        Bytes of transformed filters, besides those of `Layer.cost`.
    """
    for name in candidates(geometry):
        own = WINOGRAD.get((name, geometry.kernel[-1]))
        if own is None:
            yield geometry.flops(batch), 0
            continue
        channels, filters = geometry.channels, geometry.filters
        tiles = [-(-n // own.tile) for n in geometry.output]
        # tiles at the end of an axis may have an output less, and then they have a product less
        products = prod(
            t * own.products - min(t * own.tile - n, t)
            for t, n in zip(tiles, geometry.output, strict=True)
        )
        transforms = 2 * (own.data * channels + own.inverse * filters)
        weights = channels * filters
        yield (
            batch * (2 * products * weights + prod(tiles) * transforms) + 2 * own.filters * weights,
            2 * own.products**2 * weights * itemsize,
        )

"""Estimates of scratch memory that depends on the shapes of a model."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from pydtnn.kernels.cpu.conv import candidates, is_line
from pydtnn.kernels.cpu.volumes import planes_of
from pydtnn.kernels.geometry import ConvGeometry

# As in src/conv_filter.c and src/conv_winograd_filter.c: maximum number of parts in the sum of the
# gradient of the filters, and bytes of all parts.
PIECES, DIRECT_BYTES, WINOGRAD_BYTES = 16, 8 << 20, 5 << 20
BLOCK_BYTES = 1 << 20
"""Blocks and tiles of a thread, which fit into L2."""
# As in src/attention_parts.h.
QUERIES, KEYS, VECTOR_BYTES = 60, 128, 64
# As in src/recurrent.c: rows of all gates, and of states, for each sample.
WIDE_ROWS, NARROW_ROWS, GAP_BYTES = 2, 6, 192


def conv_scratch(
    geometries: Iterable[ConvGeometry], itemsize: int, threads: int, *, winograd: bool
) -> int:
    """Estimate the maximum scratch memory of any convolution of a model.

    Parameters
    ----------
    geometries : iterable of ConvGeometry
    itemsize : int
        Bytes of an element.
    threads : int
    winograd : bool
        Whether Winograd's algorithms are candidates, which are all measured if applicable.
    """
    largest = 0
    for geometry in geometries:
        g = planes_of(geometry) if len(geometry.size) == 3 else geometry
        filters = prod(g.weight_shape) * itemsize
        parts = min(PIECES, max(DIRECT_BYTES // filters, 1))
        arrays = parts if threads > 1 else min(parts, 2)  # a gradient may be added to
        largest = max(largest, filters * arrays)
        if winograd and len(candidates(g)) > 1:
            transformed = filters * _products(g) // prod(g.kernel)
            largest = max(largest, min(transformed * PIECES, WINOGRAD_BYTES))
    return largest + BLOCK_BYTES * threads


def _products(geometry: ConvGeometry) -> int:
    """Return the elements of a filter of one channel, transformed by Winograd's algorithm."""
    taps = max(geometry.kernel)
    if is_line(geometry):
        return {3: 6, 5: 2 * 6, 7: 2 * 8}[taps]  # parts and points
    phases = 4 if max(geometry.stride) > 1 or taps == 5 else 1  # or parts
    points = 5 if phases > 1 and geometry.kernel == (3, 3) else 6
    return phases * points**2


def attention_scratch(sizes: Iterable[tuple[int, int]], itemsize: int, threads: int) -> int:
    """Estimate the maximum scratch memory of the gradients of attention, as in the C kernel.

    Parameters
    ----------
    sizes : iterable of (int, int)
        Positions, and elements of a head.
    itemsize : int
        Bytes of an element.
    threads : int
    """
    lanes = VECTOR_BYTES // itemsize
    largest = 0
    for length, width in sizes:
        turned, rows = (-(-n // lanes) * lanes for n in (length, width))
        elements = 2 * width * turned + 3 * length * rows + 2 * QUERIES * KEYS + length
        largest = max(largest, elements * itemsize)
    return largest * threads


def recurrent_scratch(sizes: Iterable[tuple[int, int, int]], itemsize: int) -> int:
    """Estimate the maximum scratch memory of recurrent layers, as in the C kernel.

    Parameters
    ----------
    sizes : iterable of (int, int, int)
        Samples, elements of the state, and gates.
    itemsize : int
        Bytes of an element.
    """
    largest = 0
    for batch, features, gates in sizes:
        matrix = gates * features * features
        rows = (WIDE_ROWS * gates + NARROW_ROWS) * features
        gaps = (WIDE_ROWS + NARROW_ROWS) * GAP_BYTES
        largest = max(largest, (matrix + batch * rows) * itemsize + batch * gaps)
    return largest

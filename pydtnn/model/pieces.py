"""Pieces: the elements of the whole network's arrays that a rank has.

A rank of a mesh has parts of parameters and running statistics, and a scheme may leave it only a
range of the optimizer's state. `Piece` describes such elements, without a copy: which array, of
which shape, and where they are in it. Checkpoints are assembled from the pieces of all ranks, and
read into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import ParameterPart

Box = tuple[slice, ...]
"""A range of indices along each axis."""


class Region(NamedTuple):
    """A box of elements of an array.

    Attributes
    ----------
    name : str
        Name of the array in the whole network.
    dtype : str
        Name of the type of its elements, such as "float32".
    shape : tuple of int
        Shape of the whole array.
    grid : tuple of int
        Shape in which its elements are counted here, in the same (C) order.
    starts, stops : tuple of int
        First and last index, exclusive, along each axis of `grid`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of indices along each axis."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[slice, tuple[int, ...], Box, Box]]:
        """Yield the elements of the box that are in a range of the flat whole array.

        Parameters
        ----------
        start, stop : int
            The range, in elements of the flattened array.

        Yields
        ------
        run : slice
            Consecutive elements, relative to `start`.
        shape : tuple of int
            Their shape.
        there : tuple of slice
            Those of them that are in the box, as indices of the elements in that shape.
        here : tuple of slice
            The same ones as indices of an array of the box.
        """
        if len(self.grid) == 1:  # the usual case, without a search
            low, high = max(start, self.starts[0]), min(stop, self.stops[0])
            if low < high:
                run = slice(low - start, high - start)
                own = slice(low - self.starts[0], high - self.starts[0])
                yield run, (high - low,), (slice(None),), (own,)
            return
        first = start
        for covered in boxes(self.grid, start, stop):
            shape = tuple(one.stop - one.start for one in covered)
            length, there, here = prod(shape), [], []
            for one, low, high in zip(covered, self.starts, self.stops, strict=True):
                begin, end = max(one.start, low), min(one.stop, high)
                if begin >= end:
                    break
                there.append(slice(begin - one.start, end - one.start))
                here.append(slice(begin - low, end - low))
            else:
                run = slice(first - start, first - start + length)
                yield run, shape, tuple(there), tuple(here)
            first += length

    def elements(self, start: int, stop: int) -> int:
        """Return how many elements of a range of the flat whole array are in the box."""
        return sum(
            prod(own.stop - own.start for own in here)
            for _, _, _, here in self.overlaps(start, stop)
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements of an array of the whole network, and their values on this rank.

    Attributes
    ----------
    region : Region
    values : Array
        Their values, of shape ``region.lengths``: a view of the arrays that training uses.
    """

    region: Region
    values: Array

    def host(self, here: Box) -> np.ndarray:
        """Return the values of a box, copied if they are on a device."""
        values = self.values[here]
        return values if isinstance(values, np.ndarray) else values.get()

    def view(self, start: int, stop: int) -> np.ndarray | None:
        """Return the bytes of a range of the flat whole array if they are here in this order."""
        first = self.region.starts[0]
        if len(self.region.grid) > 1 or not first <= start <= stop <= self.region.stops[0]:
            return None
        values = self.values[start - first : stop - first]
        if not isinstance(values, np.ndarray) or not values.flags.c_contiguous:
            return None
        return values.view(np.uint8)

    def give(self, start: int, stop: int, out: np.ndarray) -> None:
        """Copy the elements in a range of the flat whole array into an array of that range."""
        for run, shape, there, here in self.region.overlaps(start, stop):
            out[run].reshape(shape)[there] = self.host(here)

    def take(self, start: int, stop: int, values: np.ndarray) -> None:
        """Replace the elements in a range of the flat whole array by the values of that range."""
        for run, shape, there, here in self.region.overlaps(start, stop):
            own = values[run].reshape(shape)[there]
            if isinstance(self.values, np.ndarray):
                self.values[here] = own
            else:
                staged = self.values[here].copy()
                staged.set(np.ascontiguousarray(own, staged.dtype))
                self.values[here] = staged


def full_piece(name: str, values: Array) -> Piece:
    """Return the piece of a rank that has all of an array."""
    length = int(values.size)
    region = Region(name, values.dtype.name, tuple(values.shape), (length,), (0,), (length,))
    return Piece(region, values.reshape(-1))


def part_piece(
    name: str, values: Array, part: ParameterPart | None, position: Mapping[str, int]
) -> Piece:
    """Return the piece of a rank that has a part of an array.

    Parameters
    ----------
    name : str
    values : Array
        This rank's part, C-contiguous.
    part : Part or None
        None: all of the array.
    position : mapping of str to int
        This rank's position in the mesh.
    """
    if part is None:
        return full_piece(name, values)
    ranges = {cut.dim: cut.range(position) for cut in part.grid_cuts}
    grid: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    for dim, length in enumerate(part.grid):
        own = ranges.get(dim, slice(0, length))
        if dim > 0 and dim not in ranges:  # all of it: one axis with the one before
            grid[-1] *= length
            starts[-1] *= length
            stops[-1] *= length
            continue
        grid.append(length)
        starts.append(own.start)
        stops.append(own.stop)
    region = Region(name, values.dtype.name, part.shape, tuple(grid), tuple(starts), tuple(stops))
    return Piece(region, values.reshape(region.lengths))


def range_pieces(piece: Piece, start: int, stop: int, values: Array) -> Iterator[Piece]:
    """Yield the pieces of a rank that has a range of the flattened values of a piece.

    Parameters
    ----------
    piece : Piece
        Its region is used only.
    start, stop : int
        The range, in elements of the flattened piece.
    values : Array
        The elements of the range.
    """
    region, first = piece.region, 0
    for box in boxes(region.lengths, start, stop):
        lengths = tuple(own.stop - own.start for own in box)
        count = prod(lengths)
        own = region._replace(
            starts=tuple(low + one.start for low, one in zip(region.starts, box, strict=True)),
            stops=tuple(low + one.stop for low, one in zip(region.starts, box, strict=True)),
        )
        yield Piece(own, values[first : first + count].reshape(lengths))
        first += count


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Divide a range of a flattened array into boxes, whose elements follow each other in it.

    Examples
    --------
    >>> [*boxes((3, 4), 2, 9)]
    [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None)), \
(slice(2, 3, None), slice(0, 1, None))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    rest = shape[1:]
    (first, low), (last, high) = divmod(start, prod(rest)), divmod(stop, prod(rest))
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, low, high))
        return
    if low:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, low, prod(rest)))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in rest))
    yield from ((slice(last, last + 1), *box) for box in boxes(rest, 0, high))

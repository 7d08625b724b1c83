"""The part of an array that a rank of a mesh stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.collectives import contiguous


@dataclass(frozen=True)
class Cut:
    """An axis of an array that is cut into consecutive parts, one for each rank along an axis.

    Parameters
    ----------
    dim : int
        Axis of the array.
    axis : str
        Axis of the mesh.
    bounds : tuple of int
        The rank at position r has elements ``bounds[r]`` to ``bounds[r + 1]``.
    """

    dim: int
    axis: str
    bounds: tuple[int, ...]

    def range(self, position: Mapping[str, int]) -> slice:
        """Return the elements of the rank at a position in the mesh."""
        place = position[self.axis]
        return slice(self.bounds[place], self.bounds[place + 1])

    def size(self, position: Mapping[str, int]) -> int:
        """Return the number of elements of the rank at a position in the mesh."""
        own = self.range(position)
        return own.stop - own.start


@dataclass(frozen=True)
class Part:
    """The part of an array that each rank of a mesh stores.

    Parameters
    ----------
    shape : tuple of int
        Shape of the whole array.
    cuts : tuple of Cut
        Axes that are cut, each along another axis of the mesh.
    view : tuple of int, optional
        Shape in which the axes are counted, if not `shape`: the matrix after `Flatten` is cut by
        channels, ``(O, H W, C)``.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    view: tuple[int, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which ranks have different parts, in alphabetical order."""
        return tuple(sorted(cut.axis for cut in self.cuts))

    def take(self, whole: Array, position: Mapping[str, int]) -> Array:
        """Return a copy of the part of the rank at a position, from the whole array."""
        index = [slice(None)] * len(self.view or self.shape)
        for cut in self.cuts:
            index[cut.dim] = cut.range(position)
        part = whole.reshape(self.view or self.shape)[tuple(index)].copy()
        return part.reshape(self.local_shape(position))

    def local_shape(self, position: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the part of the rank at a position."""
        shape = self._cut_shape(position)
        leading = len(self.shape) - 1  # a view has the last axis in several
        return (*shape[:leading], prod(shape[leading:]))

    def _cut_shape(self, position: Mapping[str, int]) -> list[int]:
        shape = list(self.view or self.shape)
        for cut in self.cuts:
            shape[cut.dim] = cut.size(position)
        return shape

    def gather(
        self, own: Array, position: Mapping[str, int], gather: Callable[[Array, Cut], Array]
    ) -> Array:
        """Return the whole array.

        Parameters
        ----------
        own : Array
            This rank's part.
        position : mapping
            This rank's position in the mesh.
        gather : callable
            ``gather(array, cut)`` concatenates the parts of all ranks along the cut's axis.
        """
        array = contiguous(own).reshape(self._cut_shape(position))
        for cut in self.cuts:
            array = gather(array, cut)
        return array.reshape(self.shape)

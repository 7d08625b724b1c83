"""Parts of arrays: views by slices, copies by arrays of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulated.cupy.array import DeviceArray
from tests.simulated.cupy.functions import fit, memory_of, outline_of, swapped

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy


def take_part(xp: SimulatedCupy, array: DeviceArray, where: Any) -> DeviceArray:
    """``array[where]``."""
    index = uploaded(xp, where)
    if not any(isinstance(one, DeviceArray) for one in index):
        return array.viewing(array.memory[index])
    if any(is_mask(one) for one in index):  # how many there are, only the values say
        index = tuple(part for one in index for part in positions_of(xp, one))
    outline = outline_of(array)[swapped(index, outline_of)]
    result = xp.empty(outline.shape, outline.dtype)
    source, target, positions = array.memory, result.memory, swapped(index, memory_of)

    def gather() -> None:
        target[...] = source[positions]

    xp.put(gather, blocks(array, result, *index))
    return result


def put_part(xp: SimulatedCupy, array: DeviceArray, where: Any, value: Any) -> None:
    """``array[where] = value``."""
    if isinstance(value, np.ndarray | list | tuple):
        raise TypeError(f"Unsupported type {type(value)}")
    index = uploaded(xp, where)
    positions, target = swapped(index, memory_of), array.memory
    if not any(isinstance(one, DeviceArray) for one in index):
        target, positions = target[index], ...
        fit(np.shape(value), target.shape)
    elif not any(is_mask(one) for one in index):
        fit(np.shape(value), outline_of(array)[swapped(index, outline_of)].shape)
    given = swapped(value, memory_of)

    def scatter() -> None:
        target[positions] = given

    xp.put(scatter, blocks(array, value, *index))


def uploaded(xp: SimulatedCupy, where: Any) -> tuple[Any, ...]:
    """Make an index a tuple that ends in an ellipsis; positions on the host go to the device."""
    index = where if isinstance(where, tuple) else (where,)
    index = tuple(xp.asarray(i) if isinstance(i, list | np.ndarray) else i for i in index)
    return index if any(i is ... for i in index) else (*index, ...)


def positions_of(xp: SimulatedCupy, index: Any) -> tuple[Any, ...]:
    """Replace a mask by where it is true."""
    return tuple(map(xp.asarray, index.get().nonzero())) if is_mask(index) else (index,)


def is_mask(index: Any) -> bool:
    return isinstance(index, DeviceArray) and index.dtype == bool


def blocks(*arrays: Any) -> list[Any]:
    return [array.block for array in arrays if isinstance(array, DeviceArray)]

"""Properties of host and device arrays that communicators use.

A device array is an object with a ``__cuda_array_interface__`` (version 3), such as a CuPy array;
hence arguments are checked without importing CuPy, and the type of an array alone determines
whether it is a device array.

References
----------
Numba documentation, "CUDA Array Interface (version 3)".
"""

from __future__ import annotations

from typing import Any

import numpy as np


def on_host(array: Any) -> bool:
    """Whether an array is a NumPy array."""
    return isinstance(array, np.ndarray)


def is_array(value: Any) -> bool:
    """Whether a value is a host or device array."""
    return on_host(value) or hasattr(value, "__cuda_array_interface__")


def is_writeable(array: Any) -> bool:
    """Whether an array may be written."""
    if on_host(array):
        return bool(array.flags.writeable)
    _, read_only = array.__cuda_array_interface__["data"]
    return not read_only


def address(array: Any) -> int:
    """Return the address of the first element in the unified address space of the process."""
    if on_host(array):
        return int(array.ctypes.data)
    pointer, _ = array.__cuda_array_interface__["data"]
    return int(pointer)


def to_host(array: Any) -> np.ndarray:
    """Copy an array to a NumPy array; for a device array, wait for the pending computation."""
    return np.array(array) if on_host(array) else array.get()


def fill(array: Any, values: np.ndarray) -> None:
    """Copy host values into a contiguous host or device array of the same shape."""
    if on_host(array):
        array[...] = values
    else:
        array.set(np.ascontiguousarray(values, array.dtype))


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory."""
    begin, other = address(a), address(b)
    return begin < other + b.nbytes and other < begin + a.nbytes and bool(a.nbytes and b.nbytes)

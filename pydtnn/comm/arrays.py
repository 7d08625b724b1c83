"""What communicators ask of arrays, wherever these live: on the host, or on a device.

A device array is whatever has a ``__cuda_array_interface__`` (version 3), as CuPy's arrays do; so
arguments are checked without importing CuPy, and one that lies on a device is told from one that
does not by its type alone.

References
----------
Numba documentation, "CUDA Array Interface (version 3)".
"""

from __future__ import annotations

from typing import Any

import numpy as np


def on_host(array: Any) -> bool:
    """Whether an array is NumPy's."""
    return isinstance(array, np.ndarray)


def is_array(value: Any) -> bool:
    """Whether something is an array, of the host or of a device."""
    return on_host(value) or hasattr(value, "__cuda_array_interface__")


def is_writeable(array: Any) -> bool:
    """Whether an array may be written."""
    if on_host(array):
        return bool(array.flags.writeable)
    _, read_only = array.__cuda_array_interface__["data"]
    return not read_only


def address(array: Any) -> int:
    """Return where an array begins, in the address space that all memory of a process shares."""
    if on_host(array):
        return int(array.ctypes.data)
    pointer, _ = array.__cuda_array_interface__["data"]
    return int(pointer)


def to_host(array: Any) -> np.ndarray:
    """Copy an array to one of NumPy's; where it is a device's, wait for what computes it."""
    return np.array(array) if on_host(array) else array.get()


def fill(array: Any, values: np.ndarray) -> None:
    """Copy values of the host into a contiguous array of the same shape, wherever it lies."""
    if on_host(array):
        array[...] = values
    else:
        array.set(np.ascontiguousarray(values, array.dtype))


def overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory."""
    begin, other = address(a), address(b)
    return begin < other + b.nbytes and other < begin + a.nbytes and bool(a.nbytes and b.nbytes)

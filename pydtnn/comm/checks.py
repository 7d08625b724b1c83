"""Checks of the arguments of communicators, and the properties of arrays that these need."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

# Properties of host and device arrays that communicators use.
#
# A device array is an object with a ``__cuda_array_interface__`` (version 3), such as a CuPy array;
# hence arguments are checked without importing CuPy, and the type of an array alone determines
# whether it is a device array.
#
# References
# ----------
# Numba documentation, "CUDA Array Interface (version 3)".


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


REDUCTIONS = ("sum", "max", "min")
MAX_TAG = 32767
"""The largest tag that every MPI implementation must accept (MPI 4.1, section 8.1.2)."""


def check_array(who: str, array: Any, *, writes: bool = True) -> None:
    """Raise an error unless `array` is a contiguous 1-D array, writeable if `writes`."""
    if not is_array(array):
        raise TypeError(
            f"{who}: expected a NumPy or CuPy array, got {type(array).__name__}; "
            "convert the values to an array first."
        )
    if array.ndim != 1:
        raise ValueError(
            f"{who}: expected a 1-D array, got shape {array.shape}; "
            "pass array.reshape(-1) of a contiguous array."
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{who}: expected a contiguous array, got a stride of {array.strides[0]} bytes between "
            f"elements of {array.itemsize} bytes; copy the values to a contiguous array."
        )
    if array.dtype.hasobject:
        raise TypeError(
            f"{who}: expected numbers, got an array of Python objects; use gather_object instead."
        )
    if writes and not is_writeable(array):
        raise ValueError(
            f"{who}: expected a writeable array for the result, got a read-only one; pass a copy."
        )


def check_reduction(who: str, array: np.ndarray, op: str) -> None:
    """Raise an error if the operation is unknown or elements are not native numbers."""
    if op not in REDUCTIONS:
        raise ValueError(f"{who}: unknown operation {op!r}; use one of {', '.join(REDUCTIONS)}.")
    # NumPy does not classify the bfloat16 of ml_dtypes as a float.
    is_number = array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"
    if not is_number or not array.dtype.isnative:
        raise TypeError(
            f"{who}: expected native integers or floats, got {array.dtype}; convert the array."
        )


def check_rank(who: str, rank: int, size: int) -> int:
    """Return `rank` as an int; raise ValueError if it is not in the group."""
    rank = operator.index(rank)
    if not 0 <= rank < size:
        raise ValueError(f"{who}: rank must be from 0 to {size - 1}, got {rank}.")
    return rank


def check_other(who: str, rank: int, own: int, size: int) -> None:
    """Raise ValueError if a rank is not in the group or is the calling rank."""
    if check_rank(who, rank, size) == own:
        raise ValueError(
            f"{who}: expected another rank, got {own}, this rank itself; copy the array instead."
        )


def check_tag(who: str, tag: int) -> int:
    """Return `tag` as an int; raise ValueError if some MPI library may not support it."""
    tag = operator.index(tag)
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"{who}: tag must be from 0 to {MAX_TAG}, got {tag}.")
    return tag


def check_parts(
    who: str, part: np.ndarray, counts: Sequence[int], whole: np.ndarray, rank: int, size: int
) -> list[int]:
    """Return `counts` as a list; raise an error if they do not partition `whole` into parts."""
    counts = [operator.index(count) for count in counts]
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{who}: expected {size} counts, none below 0, got {counts}.")
    if sum(counts) != whole.size:
        raise ValueError(
            f"{who}: expected counts with a sum of {whole.size}, the length of the whole array, "
            f"got {counts} with a sum of {sum(counts)}."
        )
    if part.size != counts[rank]:
        raise ValueError(
            f"{who}: expected a part of {counts[rank]} elements, the count of rank {rank}, "
            f"got {part.size} elements."
        )
    if on_host(part) != on_host(whole):
        raise TypeError(
            f"{who}: expected part and whole array in the same memory, got the part "
            f"{_where(part)} and the whole array {_where(whole)}; copy one of them."
        )
    if part.dtype != whole.dtype:
        raise TypeError(
            f"{who}: expected part and whole array of the same type, got {part.dtype} and "
            f"{whole.dtype}; convert one of them."
        )
    return counts


def _where(array: np.ndarray) -> str:
    return "on the host" if on_host(array) else "on a device"


def wrong_length(expected: int, given: int | None) -> str:
    """Error text for a message of wrong length; lengths in bytes, None: longer than expected."""
    return (
        f"recv: expected a message of {expected} bytes, got {'more' if given is None else given}; "
        "receive into an array of the type and length that is sent."
    )

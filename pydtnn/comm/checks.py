"""What every communicator demands of its arguments, in one place and in plain words."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.comm.arrays import is_array, is_writeable, on_host

REDUCTIONS = ("sum", "max", "min")
MAX_TAG = 32767
"""The largest tag that every MPI implementation must accept (MPI 4.1, section 8.1.2)."""


def check_array(who: str, array: Any, *, writes: bool = True) -> None:
    """Refuse what is no contiguous 1-D array (or not writeable where `who` writes)."""
    if not is_array(array):
        raise TypeError(
            f"{who}: expected an array of NumPy or CuPy, got {type(array).__name__}; "
            "put the values into an array first."
        )
    if array.ndim != 1:
        raise ValueError(
            f"{who}: expected a 1-D array, got shape {array.shape}; "
            "pass array.reshape(-1) of a contiguous array."
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{who}: expected a contiguous array, got a step of {array.strides[0]} bytes between "
            f"elements of {array.itemsize}; keep the values in an array of their own."
        )
    if array.dtype.hasobject:
        raise TypeError(
            f"{who}: expected numbers, got an array of Python objects; use gather_object for these."
        )
    if writes and not is_writeable(array):
        raise ValueError(f"{who}: the array is read-only, but the result is written into it.")


def check_reduction(who: str, array: np.ndarray, op: str) -> None:
    """Refuse an unknown operation and elements that are no numbers of the machine."""
    if op not in REDUCTIONS:
        raise ValueError(f"{who}: unknown operation {op!r}; use one of {', '.join(REDUCTIONS)}.")
    # To NumPy, the bfloat16 of ml_dtypes is a type that it knows nothing about.
    is_number = array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"
    if not is_number or not array.dtype.isnative:
        raise TypeError(
            f"{who}: cannot reduce elements of type {array.dtype}; use native integers or floats."
        )


def check_rank(who: str, rank: int, size: int) -> int:
    """Return `rank` as an int, refusing one that is not in the group."""
    rank = operator.index(rank)
    if not 0 <= rank < size:
        raise ValueError(f"{who}: rank {rank} is not in a group of {size}; use 0 to {size - 1}.")
    return rank


def check_other(who: str, rank: int, own: int, size: int) -> None:
    """Refuse a rank that is not in the group, or the one that calls."""
    if check_rank(who, rank, size) == own:
        raise ValueError(f"{who}: rank {own} cannot exchange with itself; copy the array.")


def check_tag(who: str, tag: int) -> int:
    """Return `tag` as an int, refusing one that some MPI would not accept."""
    tag = operator.index(tag)
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"{who}: tag {tag} is out of range; use 0 to {MAX_TAG}.")
    return tag


def check_parts(
    who: str, part: np.ndarray, counts: Sequence[int], whole: np.ndarray, rank: int, size: int
) -> list[int]:
    """Return `counts` as a list, refusing counts that do not cut `whole` into the ranks' parts."""
    counts = [operator.index(count) for count in counts]
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{who}: expected {size} counts, none below 0, got {counts}.")
    if sum(counts) != whole.size:
        raise ValueError(
            f"{who}: the counts {counts} add up to {sum(counts)}, but the whole array has "
            f"{whole.size} elements; make them equal."
        )
    if part.size != counts[rank]:
        raise ValueError(
            f"{who}: rank {rank} has count {counts[rank]}, but its part has {part.size} elements; "
            "make them equal."
        )
    if on_host(part) != on_host(whole):
        raise TypeError(
            f"{who}: the part is {_where(part)} and the whole array {_where(whole)}; "
            "bring both to one place."
        )
    if part.dtype != whole.dtype:
        raise TypeError(
            f"{who}: the part has type {part.dtype} and the whole array {whole.dtype}; "
            "use one type for both."
        )
    return counts


def _where(array: np.ndarray) -> str:
    return "on the host" if on_host(array) else "on a device"

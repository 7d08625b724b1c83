"""Checkpoints of a run, examined outside of training: verified and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm import Serial
from pydtnn.model.pieces import full_piece
from pydtnn.training.checkpoint.folder import STATE, find_checkpoints
from pydtnn.training.checkpoint.layout import Described
from pydtnn.training.checkpoint.reading import (
    Checkpoint,
    read_checkpoint,
    read_into,
    verify,
)


class ArrayDifference(NamedTuple):
    """How an array differs between two checkpoints.

    Attributes
    ----------
    name : str
    elements : int
        Number of elements that differ.
    size : int
        Number of all elements.
    absolute, relative : float
        Largest difference, and the norm of the differences over that of the first array.
    reason : str
        Why the arrays cannot be compared: only in one checkpoint, or another shape or type.
    """

    name: str
    elements: int = 0
    size: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    reason: str = ""


def examine(path: Path) -> tuple[Checkpoint | None, str]:
    """Read and verify a checkpoint; return it, and what is wrong with it (empty if nothing)."""
    found = None
    try:
        found = read_checkpoint(path)
        verify(found, found.layout.files)
    except ValueError as error:
        return found, str(error)
    return found, ""


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[ArrayDifference]:
    """Yield the differences of the arrays of two checkpoints, in the order of their names.

    Raises
    ------
    ValueError
        If a file cannot be read.
    """
    for name in sorted({*first.layout.arrays, *second.layout.arrays}):
        own, other = (one.layout.arrays.get(name) for one in (first, second))
        if own is None or other is None:
            yield ArrayDifference(
                name, reason=f"only in the {'second' if own is None else 'first'}"
            )
        elif own != other:
            yield ArrayDifference(name, reason=f"{_describe(own)} and {_describe(other)}")
        else:
            found = _compare(name, *(_read(one, name, own) for one in (first, second)))
            if found.elements:
                yield found


def value_differences(first: Any, second: Any, where: str = "") -> Iterator[str]:
    """Yield the differences of two JSON values, such as "parts.trainer: epoch 1 -> 2"."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys([*first, *second]):
            yield from value_differences(
                first.get(key, ABSENT), second.get(key, ABSENT), f"{where}{'.' * bool(where)}{key}"
            )
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (own, other) in enumerate(zip(first, second, strict=True)):
            yield from value_differences(own, other, f"{where}[{number}]")
    elif first != second and not (first != first and second != second):  # both NaN
        yield f"{where}: {_show(first)} -> {_show(second)}"


ABSENT = object()
"""Stands for a value that only the other checkpoint has."""


def _read(checkpoint: Checkpoint, name: str, array: Described) -> np.ndarray:
    values = np.empty(array.shape, np.dtype(array.dtype))
    read_into(Serial(), checkpoint, [full_piece(name, values)], [0])
    return values


@np.errstate(all="ignore")
def _compare(name: str, first: np.ndarray, second: np.ndarray) -> ArrayDifference:
    raw = (array.reshape(-1).view(np.uint8).reshape(array.size, -1) for array in (first, second))
    differ = (next(raw) != next(raw)).any(axis=1)
    number = int(differ.sum())
    if not number:
        return ArrayDifference(name)
    own, other = (array.reshape(-1)[differ].astype(np.float64) for array in (first, second))
    norm = float(np.linalg.norm(first.reshape(-1).astype(np.float64)))
    distance = float(np.linalg.norm(other - own))
    relative = distance / norm if norm else np.inf
    return ArrayDifference(name, number, first.size, float(np.abs(other - own).max()), relative)


def _describe(array: Described) -> str:
    return f"{array.dtype} {' x '.join(map(str, array.shape)) or 'number'}"


def _show(value: Any) -> str:
    text = "absent" if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def newest(path: Path) -> Path:
    """Return a checkpoint, or the newest one in the folder of a run.

    Raises
    ------
    ValueError
        If there is none.
    """
    if (path / STATE).is_file():
        return path
    found = find_checkpoints(path)
    if not found:
        raise ValueError(f"{path} is no checkpoint, and contains none")
    return found[-1]

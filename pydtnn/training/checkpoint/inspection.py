"""Checkpoints of a run, examined outside of training: verified, compared and repaired."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm import Serial
from pydtnn.model.pieces import full_piece
from pydtnn.training.checkpoint.folder import STATE, find_checkpoints, partial_path, sums_of, tidy
from pydtnn.training.checkpoint.layout import Described
from pydtnn.training.checkpoint.reading import (
    Checkpoint,
    read_checkpoint,
    read_into,
    verify,
)
from pydtnn.utils.files import Checksums, open_file, path_inside


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


def repair(directory: Path) -> list[str]:
    """Repair the checkpoints in a folder in which no run is writing; return what was done.

    Incomplete checkpoints are removed. A damaged file is replaced by that of another checkpoint
    with the same checksum, if there is one. Checkpoints that remain damaged are put aside, as
    ``.checkpoint-<step>.damaged``, so that they are not found any more.

    Raises
    ------
    OSError
        If files cannot be changed.
    """
    done = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".checkpoint-") and path.suffix in (".partial", ".replaced"):
            verb = "removed" if path.suffix == ".partial" else "examined"
            done.append(f"{path.name}: {verb}, as it was left by a process that was killed")
    tidy(directory)
    paths = find_checkpoints(directory)
    for path in paths:
        _, problem = examine(path)
        if not problem:
            continue
        copied = _copy_from_others(path, [other for other in paths if other != path])
        _, left = examine(path)
        if not left:
            done.append(f"{path.name}: {', '.join(copied)} copied from another checkpoint")
            continue
        aside = partial_path(path).with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        done.append(f"{path.name}: {left}; put aside as {aside.name}")
    return done


def _copy_from_others(path: Path, others: list[Path]) -> list[str]:
    """Replace damaged files by intact ones of other checkpoints; return their names."""
    copied = []
    with contextlib.suppress(ValueError):
        kind, sums = sums_of(path)
        for name, digest in sums.items():
            target = path_inside("repair", path, name)
            if _digest(target, kind) == digest:
                continue
            for other in others:
                with contextlib.suppress(ValueError, OSError):
                    same = [n for n, own in sums_of(other)[1].items() if own == digest]
                    source = path_inside("repair", other, same[0]) if same else None
                    if source is not None and _digest(source, kind) == digest:
                        _replace(source, target)
                        copied.append(name)
                        break
    return copied


def _replace(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.copy")
    shutil.copyfile(source, temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)


def _digest(path: Path, kind: Checksums) -> str | None:
    """Return the checksum of a regular file; None if it cannot be read."""
    try:
        with open_file("it", path) as file:
            return hashlib.file_digest(file, kind.new).hexdigest()  # type: ignore[arg-type]
    except (OSError, ValueError):
        return None


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

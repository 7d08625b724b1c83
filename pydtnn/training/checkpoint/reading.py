"""The files of a checkpoint as they are read: described and verified first, then by ranges."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.model.pieces import Piece, Region, full_piece
from pydtnn.training.checkpoint.assembly import cut
from pydtnn.training.checkpoint.content import Parts, check_states, prefix_of, read_content
from pydtnn.training.checkpoint.folder import STATE, sums_of
from pydtnn.training.checkpoint.layout import (
    DataFile,
    Described,
    Layout,
    data_files,
    read_layout,
)
from pydtnn.utils.files import Checksums, check_digest, open_file, read_file

CACHED_BYTES = 1 << 18
"""Length of the pieces that are compared with checksums while they are in the cache, in B."""

THREADS = 4
"""Threads of a rank that read files, of which some wait for the disk."""

MAX_STATE_B = 1 << 30
"""Largest plausible length of `state.json`, in B."""


@dataclass(frozen=True)
class Checkpoint:
    """What the files of a checkpoint contain.

    Attributes
    ----------
    path : Path
    content : dict
        That of `state.json`.
    layout : Layout
        Its arrays, and where they are.
    kind : Sums
    sums : dict of str to str
        Checksums of the files, of this kind.
    """

    path: Path
    content: dict[str, Any]
    layout: Layout
    kind: Checksums
    sums: dict[str, str]

    def parts(self) -> Parts:
        """Return the states of all parts; their arrays have types and shapes, but no memory."""
        return {
            name: [
                {
                    key: stub(self.layout.arrays[prefix_of(name, number, len(states)) + key])
                    for key in state["arrays"]
                }
                | state["values"]
                for number, state in enumerate(states)
            ]
            for name, states in self.content["parts"].items()
        }

    @property
    def nbytes(self) -> int:
        """Length of the files with arrays, in B."""
        return sum(file.size for file in self.layout.files)


def stub(array: Described) -> np.ndarray:
    """Return an array of a type and shape, without memory for its elements."""
    return np.broadcast_to(np.zeros((), np.dtype(array.dtype)), array.shape)


def read_state(path: Path) -> tuple[dict[str, Any], Checksums, dict[str, str]]:
    """Return the content of `state.json` of a checkpoint, and `sums_of` it.

    Raises
    ------
    ValueError
        If they are missing, damaged or of another version.
    """
    kind, sums = sums_of(path)
    try:
        state = read_file("it", path / STATE, MAX_STATE_B, folder=path)
    except OSError as error:
        raise _unreadable(STATE, error) from error
    check_digest(STATE, sums.get(STATE), kind.of(state))
    return read_content(state), kind, sums


def read_checkpoint(path: Path) -> Checkpoint:
    """Read everything but the elements of arrays.

    Raises
    ------
    ValueError
        If a file is missing or invalid, was written by another version of pydtnn, or parts or
        arrays are missing or have another type.
    """
    content, kind, sums = read_state(path)
    known = _names(content)
    names = data_files(sums)
    try:
        layout = read_layout(path, names, known, content.get("split", {}))
    except OSError as error:
        raise _unreadable(names[0], error) from error
    for name in known:
        if name not in layout.arrays:
            raise ValueError(f"{_where(names)} does not contain the array {name}")
    for name in sorted(layout.arrays):
        if name not in known:
            raise ValueError(f"{_where(names)} contains an array that belongs to no part, {name}")
    checkpoint = Checkpoint(path, content, layout, kind, sums)
    check_states(checkpoint.parts())
    return checkpoint


def is_visible(checkpoint: Checkpoint) -> bool:
    """Return whether this rank can read the files of a checkpoint that rank 0 has described."""
    try:
        return all(
            os.stat(checkpoint.path / file.name).st_size == file.size
            for file in checkpoint.layout.files
        )
    except OSError:
        return False


def verify(checkpoint: Checkpoint, files: Iterable[DataFile]) -> None:
    """Compare files with their checksums, and check that weights are finite.

    Raises
    ------
    ValueError
        If one does not match, cannot be read, or contains weights that are not finite.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(partial(_verify, checkpoint), files):
            pass


def examine(path: Path) -> tuple[Checkpoint | None, str]:
    """Read and verify a checkpoint; return it, and what is wrong with it (empty if nothing)."""
    found = None
    try:
        found = read_checkpoint(path)
        verify(found, found.layout.files)
    except ValueError as error:
        return found, str(error)
    return found, ""


def _verify(checkpoint: Checkpoint, file: DataFile) -> None:
    layout, total, bad = checkpoint.layout, checkpoint.kind.new(), ""
    total.update(file.header)
    try:
        with open_file("it", checkpoint.path / file.name) as stream:
            if stream.read(len(file.header)) != file.header:
                raise ValueError(f"{file.name} does not match its checksum")
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            memory = np.empty(CACHED_BYTES, np.uint8)
            for segment in file.segments:
                dtype = np.dtype(layout.arrays[segment.array].dtype)
                length, left = CACHED_BYTES // dtype.itemsize, segment.stop - segment.start
                is_model = segment.array.startswith("model/")
                for first in range(0, left, length):
                    block = memory.view(dtype)[: min(length, left - first)]
                    if _read_into(stream, block) < block.nbytes:
                        break
                    total.update(block.view(np.uint8).data)
                    if is_model and not np.isfinite(block).all():
                        bad = segment.array.replace("/", ": ", 1)
            total.update(stream.read(1))
    except OSError as error:
        raise _unreadable(file.name, error) from error
    check_digest(file.name, checkpoint.sums.get(file.name), total.hexdigest())
    if bad:
        raise ValueError(f"{bad} must be finite")


def read_into(
    comm: Communicator,
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    readers: Sequence[int],
) -> None:
    """Read the elements of pieces, whose names are those in the checkpoint.

    Collective: all ranks call it. A rank reads the ranges that it needs. If some cannot read the
    files, the first that can reads them for all.

    Parameters
    ----------
    comm : Communicator
    checkpoint : Checkpoint
    pieces : sequence of Piece
        Those of this rank.
    readers : sequence of int
        The ranks that can read the files.

    Raises
    ------
    ValueError
        On some ranks, if files cannot be read; the pieces then have any values.
    """
    wanted: dict[str, list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault(piece.region.name, []).append(piece)
    together, arrays = len(readers) < comm.size, checkpoint.layout.arrays

    def read(file: DataFile) -> ValueError | None:
        """Read what is needed of a file; return why that is not possible."""
        error: ValueError | None = None
        with ExitStack() as stack:
            stream = None
            if not together or comm.rank == readers[0]:
                try:
                    stream = stack.enter_context(open_file("it", checkpoint.path / file.name))
                except (OSError, ValueError) as problem:
                    error = _unreadable(file.name, problem)
            for segment, start, stop in cut(checkpoint.layout, file):
                own = wanted.get(segment.array, ())
                described = arrays[segment.array]
                dtype = np.dtype(described.dtype)
                first, last = (start, stop) if together else _span(own, start, stop)
                if first == last:
                    continue
                part = None
                if not together and len(own) == 1 and own[0].region.dtype == described.dtype:
                    part = own[0].view(first, last)
                in_place = part is not None
                if part is None:
                    block = np.empty(stop - start, dtype)
                    part = block[first - start : last - start].view(np.uint8)
                if stream is not None:
                    try:
                        stream.seek(segment.offset + (first - segment.start) * dtype.itemsize)
                        if _read_into(stream, part) < part.nbytes:
                            error = ValueError(f"{file.name} is truncated")
                    except OSError as problem:
                        error = _unreadable(file.name, problem)
                if together:
                    comm.broadcast(part, readers[0])
                for piece in () if in_place else own:
                    piece.take(start, stop, block)
        return error

    files = [
        file
        for file in checkpoint.layout.files
        if together or any(segment.array in wanted for segment in file.segments)
    ]
    if together:
        errors = [*map(read, files)]
    else:
        with ThreadPoolExecutor(THREADS) as threads:
            errors = [*threads.map(read, files)]
    for error in filter(None, errors):
        raise error


def read_part(checkpoint: Checkpoint, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of the first state of a part, whole.

    Raises
    ------
    ValueError
        If files cannot be read.
    """
    states = checkpoint.content["parts"][name]
    prefix = prefix_of(name, 0, len(states))
    result = {}
    for key in states[0]["arrays"]:
        described = checkpoint.layout.arrays[prefix + key]
        result[key] = np.empty(described.shape, np.dtype(described.dtype))
    pieces = [full_piece(prefix + key, array) for key, array in result.items()]
    read_into(Serial(), checkpoint, pieces, [0])
    return result


def _span(pieces: Iterable[Piece], start: int, stop: int) -> tuple[int, int]:
    """Return the smallest range of elements that contains those of pieces in a range."""
    first, last = stop, start
    for piece in pieces:
        for run, shape, there, _ in piece.region.overlaps(start, stop):
            ends = [own.indices(length) for own, length in zip(there, shape, strict=True)]
            low = np.ravel_multi_index([begin for begin, _, _ in ends], shape)
            high = np.ravel_multi_index([end - 1 for _, end, _ in ends], shape) + 1
            first = min(first, start + run.start + int(low))
            last = max(last, start + run.start + int(high))
    return (first, last) if first < last else (start, start)


def _read_into(stream: BinaryIO, out: np.ndarray) -> int:
    """Fill an array from a file; return the number of bytes read."""
    view, done = out.view(np.uint8).data, 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


def rename(piece: Piece, prefix: str) -> Piece:
    """Return a piece of an array with a prefix."""
    region: Region = piece.region._replace(name=prefix + piece.region.name)
    return Piece(region, piece.values)


def _names(content: Mapping[str, Any]) -> set[str]:
    return {
        prefix_of(name, number, len(states)) + key
        for name, states in content["parts"].items()
        for number, state in enumerate(states)
        for key in state["arrays"]
    }


def _where(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "the checkpoint"


def _unreadable(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name} cannot be read ({str(error).removeprefix('it: ')})")

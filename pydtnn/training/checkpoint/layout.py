"""The arrays of a checkpoint as files: the same for any number of ranks and any mesh.

All arrays, those with wider elements first and then by name, follow each other in one sequence of
bytes, which is cut into files of equal length. Each is a safetensors file, which other programs can
read. An array that is in several files is flat in each, and named with its elements there:
``model/fc.w[0:4194304]``. A small network has a single file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pydtnn.saving.weights import CODES, MAX_HEADER_B, encode_header, entry_of, read_entries
from pydtnn.utils.files import open_file
from pydtnn.utils.version import __version__

ARRAYS = "arrays.safetensors"
"""Name of the file with all arrays, if they are in one."""

FILE_BYTES, MAX_FILES = 16 << 20, 256
"""Length of the data in a file, in B; it doubles until there are at most so many files."""

_NAME = re.compile(r"arrays(-[0-9]{5}-of-[0-9]{5})?\.safetensors")

_RANGE = re.compile(r"(?P<name>.*)\[(?P<start>[0-9]{1,18}):(?P<stop>[0-9]{1,18})\]", re.DOTALL)


class Described(NamedTuple):
    """Type and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize


class FileSegment(NamedTuple):
    """Consecutive elements of an array that are in one file.

    Attributes
    ----------
    array : str
    start, stop : int
        The elements, in those of the flattened array.
    offset : int
        Position of the first one in the file, in B.
    """

    array: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class DataFile:
    """A file with arrays.

    Attributes
    ----------
    name : str
    header : bytes
        What precedes the first array.
    segments : tuple of Segment
        In the order of their positions.
    size : int
        Length of the file, in B.
    """

    name: str
    header: bytes
    segments: tuple[FileSegment, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The arrays of a checkpoint and the files that contain them.

    Attributes
    ----------
    arrays : dict of str to Described
    files : tuple of DataFile
    """

    arrays: dict[str, Described]
    files: tuple[DataFile, ...]

    @cached_property
    def places(self) -> dict[str, list[tuple[DataFile, FileSegment]]]:
        """The files and segments of each array, in the order of its elements."""
        places: dict[str, list[tuple[DataFile, FileSegment]]] = {name: [] for name in self.arrays}
        for file in self.files:
            for segment in file.segments:
                places[segment.array].append((file, segment))
        return {name: sorted(found, key=lambda one: one[1].start) for name, found in places.items()}

    @property
    def split(self) -> dict[str, list[int]]:
        """The shapes of arrays that are in several files."""
        places = sorted(self.places.items())
        return {name: [*self.arrays[name].shape] for name, found in places if len(found) > 1}


def arrange(arrays: Mapping[str, Described]) -> Layout:
    """Divide arrays into files.

    Raises
    ------
    TypeError
        If elements have a type that safetensors files do not support.
    """
    for name, array in arrays.items():
        if array.dtype not in CODES:
            raise TypeError(
                f"checkpoint: {name} must have elements such as float32, got {array.dtype}"
            )
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    total = sum(array.size * array.itemsize for array in arrays.values())
    length = FILE_BYTES
    while total > length * MAX_FILES:
        length *= 2
    contents: list[list[tuple[str, int, int]]] = [[]]
    room = length
    for name in names:
        array, start = arrays[name], 0
        while True:
            stop = min(array.size, start + room // array.itemsize)
            if stop > start or array.size == 0:
                contents[-1].append((name, start, stop))
                room -= (stop - start) * array.itemsize
            start = stop
            if start == array.size:
                break
            contents.append([])
            room = length
    files = [
        _file(file_name(number, len(contents)), arrays, content)
        for number, content in enumerate(contents)
    ]
    return Layout(dict(arrays), tuple(files))


def file_name(number: int, files: int) -> str:
    """Return the name of a file, counted from 0, of so many.

    >>> file_name(0, 1), file_name(2, 12)
    ('arrays.safetensors', 'arrays-00003-of-00012.safetensors')
    """
    return ARRAYS if files == 1 else f"arrays-{number + 1:05d}-of-{files:05d}.safetensors"


def _file(
    name: str, arrays: Mapping[str, Described], content: Iterable[tuple[str, int, int]]
) -> DataFile:
    entries: dict[str, object] = {"__metadata__": {"pydtnn": __version__}}
    offset, segments = 0, []
    for array, start, stop in content:
        described = arrays[array]
        is_whole = stop - start == described.size
        key = array if is_whole else f"{array}[{start}:{stop}]"
        end = offset + (stop - start) * described.itemsize
        shape = described.shape if is_whole else (stop - start,)
        entries[key] = entry_of(described.dtype, shape, offset, end)
        segments.append(FileSegment(array, start, stop, offset))
        offset = end
    header = encode_header(entries)
    placed = tuple(s._replace(offset=s.offset + len(header)) for s in segments)
    return DataFile(name, header, placed, len(header) + offset)


def data_files(names: Iterable[str]) -> list[str]:
    """Return the files with arrays among the names of files, in their order."""
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_layout(
    folder: Path, names: Iterable[str], known: Collection[str], split: Mapping[str, list[int]]
) -> Layout:
    """Read the headers of files with arrays.

    Parameters
    ----------
    folder : Path
    names : iterable of str
        The files.
    known : collection of str
        Names of the arrays.
    split : mapping of str to list of int
        Shapes of arrays that are in several files.

    Raises
    ------
    ValueError
        If a file is not valid, or arrays are missing or incomplete.
    OSError
        If a file cannot be read.
    """
    files: list[DataFile] = []
    arrays: dict[str, Described] = {}
    for name in names:
        size, header, entries = _read_header(folder / name)
        segments = []
        for key, described, offset in entries:
            array, start, stop = key, 0, described.size
            if key not in known and (part := _RANGE.fullmatch(key)) and part["name"] in split:
                array, start, stop = part["name"], int(part["start"]), int(part["stop"])
                if stop - start != described.size:
                    raise ValueError(f"{name}: {key} must have {stop - start} elements")
                described = Described(described.dtype, tuple(split[array]))
            if arrays.setdefault(array, described) != described:
                raise ValueError(f"{name}: {array} has another type or shape than before")
            segments.append(FileSegment(array, start, stop, offset))
        files.append(DataFile(name, header, tuple(segments), size))
    layout = Layout(arrays, tuple(files))
    for array, places in layout.places.items():
        ends = [0, *(segment.stop for _, segment in places)]
        starts = [*(segment.start for _, segment in places), arrays[array].size]
        if ends != starts:
            raise ValueError(f"the array {array} is not complete")
    return layout


def _read_header(path: Path) -> tuple[int, bytes, list[tuple[str, Described, int]]]:
    """Return the size of a file, its header, and the arrays in it with their offsets."""
    with open_file("it", path, folder=path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_B):
            raise ValueError(f"{path.name}: not a safetensors file, or truncated")
        text = file.read(length)
    try:
        found = read_entries(start + text, size)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    entries = [(one.name, Described(one.dtype.name, one.shape), one.offset) for one in found]
    return size, start + text, entries

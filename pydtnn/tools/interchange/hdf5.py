"""Arrays and texts in HDF5 files, as far as Keras uses the format.

The library of HDF5 follows links and storage into other files, and does not return from some files
that are damaged. Here, a file is a sequence of bytes: an object is a header at an address, a header
is a list of messages, and an array is a part of the file. Whatever refers to another place, is
compressed or uses a structure that h5py does not write by default raises an error.

References
----------
The HDF Group, "HDF5 File Format Specification Version 3.0", sections II to IV.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import NoReturn

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.tools.interchange.archives import Buffer

SIGNATURE = b"\x89HDF\r\n\x1a\n"
UNDEFINED_ADDRESS = (1 << 64) - 1
"""Address of what was not stored."""

MAX_AXES = 32
MAX_DEPTH = 32
"""Of the nodes of a tree with the names in a group."""

MAX_HEAP_OBJECTS = 1 << 18
"""Texts in the heaps that are read."""

DATASPACE, LINK_INFO, DATATYPE, LINK, EXTERNAL, LAYOUT = 0x01, 0x02, 0x03, 0x06, 0x07, 0x08
FILTERS, ATTRIBUTE, MORE, TABLE = 0x0B, 0x0C, 0x10, 0x11
"""Types of messages in headers."""

SHARED_MESSAGE = 2
"""Flag of a message that is stored elsewhere."""

SOFT_LINK = 2
"""Type of a name that is a link."""

FLOATS = {
    (2, 16, 5, 10, 15): "f2",
    (4, 32, 8, 23, 127): "f4",
    (8, 64, 11, 52, 1023): "f8",
}
"""IEEE formats by size, precision, sizes of exponent and mantissa, and bias."""


class Hdf5:
    """A file in memory.

    Attributes
    ----------
    root : Node

    Raises
    ------
    ValueError
        If it is no such file; all methods of it and its nodes raise ValueError if it is damaged.
    """

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}
        self._heap_objects = 0
        if bytes(data[:8]) != SIGNATURE or self.number(8, 1) > 1:
            _fail("expected an HDF5 file as Keras writes it, got another one")
        if self.number(13, 1) != 8 or self.number(14, 1) != 8:
            _fail("the addresses in the file are not of 8 bytes; save it again with h5py")
        begin = 28 if self.number(8, 1) else 24
        if self.number(begin, 8) != 0:
            _fail("the file has a user block; save it again with h5py")
        self.root = Hdf5Node(self, "", self.number(begin + 40, 8))

    def part(self, place: int, size: int) -> bytes:
        """Return a part of the file."""
        if place + size > len(self.data):
            _fail("the file is truncated or damaged: it refers to a place behind its end")
        return bytes(self.data[place : place + size])

    def number(self, place: int, size: int) -> int:
        """Return a whole number."""
        return int.from_bytes(self.part(place, size), "little")

    def expect(self, place: int, name: bytes) -> None:
        """Check the name of a structure."""
        if self.part(place, 4) != name:
            _fail(f"the file is damaged: {name.decode()} is missing")

    def heap_text(self, place: int, index: int, size: int) -> bytes:
        """Return a text in a heap."""
        if place not in self._heaps:
            self._heaps[place] = self._read_heap(place)
        begin, length = self._heaps[place].get(index, (0, -1))
        if size > length:
            _fail("the file is damaged: a text is missing")
        return self.part(begin, size)

    def _read_heap(self, place: int) -> dict[int, tuple[int, int]]:
        """Return places and sizes of texts by number."""
        self.expect(place, b"GCOL")
        end, place = place + self.number(place + 8, 8), place + 16
        found: dict[int, tuple[int, int]] = {}
        while place + 16 <= end:
            number, size = self.number(place, 2), self.number(place + 8, 8)
            self._heap_objects += 1
            if self._heap_objects > MAX_HEAP_OBJECTS:
                _fail(f"the file has more than {MAX_HEAP_OBJECTS} texts")
            if number:
                found[number] = place + 16, size
            place += 16 + -(-size // 8) * 8 if number else max(size, 16)
        return found


class Hdf5Node:
    """A group or an array: the messages of a header.

    Attributes
    ----------
    path : str
    is_group : bool
    """

    def __init__(self, file: Hdf5, path: str, address: int) -> None:
        self.file, self.path, self.address = file, path, address
        self._messages = self._read(address)
        self.is_group = TABLE in self._messages
        if LINK in self._messages or LINK_INFO in self._messages:
            _fail(f"{self._shown} has links to other places or files; copy its content")

    @property
    def _shown(self) -> str:
        return f"{self.path or '/'!r:.80}"

    def _read(self, address: int) -> dict[int, list[bytes]]:
        """Return the messages by type."""
        file = self.file
        if file.number(address, 1) != 1:
            _fail(f"{self._shown} has a header of another version; save the file again with h5py")
        blocks = [(address + 16, file.number(address + 8, 4))]
        seen: set[int] = set()
        messages: dict[int, list[bytes]] = {}
        for place, size in blocks:
            if place in seen:
                _fail(f"the header of {self._shown} is endless")
            seen.add(place)
            end = place + size
            while place + 8 <= end:
                kind, length = file.number(place, 2), file.number(place + 2, 2)
                content = file.part(place + 8, length)
                if file.number(place + 4, 1) & SHARED_MESSAGE:
                    _fail(f"{self._shown} refers to a shared type; save the file again with h5py")
                if kind == MORE:
                    first, second = (int.from_bytes(content[i : i + 8], "little") for i in (0, 8))
                    blocks.append((first, second))
                messages.setdefault(kind, []).append(content)
                place += 8 + length
        return messages

    def _message(self, kind: int) -> bytes:
        (message,) = self._messages.get(kind) or [b""]
        return message or _fail(f"{self._shown} is not an array")

    def names(self) -> list[str]:
        """Return the names in a group."""
        return [*self._entries()]

    def find(self, path: str) -> Hdf5Node:
        """Return the group or array at a path in a group."""
        found = self
        for name in path.split("/"):
            where = f"{found.path}/{name}".lstrip("/")
            entries = found._entries() if found.is_group and name not in (".", "..") else {}
            address = entries.get(name)
            if address is None:
                kind = "is a link to another place; copy it" if name in entries else "is missing"
                _fail(f"{where!r:.80} {kind}")
            found = Hdf5Node(self.file, where, address)
        return found

    def _entries(self) -> dict[str, int | None]:
        """Return the addresses of the objects in a group by name; None for links."""
        if not hasattr(self, "_found"):
            self._found: dict[str, int | None] = {}
            table = self._message(TABLE)
            tree, heap = (int.from_bytes(table[i : i + 8], "little") for i in (0, 8))
            self.file.expect(heap, b"HEAP")
            names = self.file.part(self.file.number(heap + 24, 8), self.file.number(heap + 8, 8))
            self._add(tree, names, set(), MAX_DEPTH)
        return self._found

    def _add(self, tree: int, names: bytes, seen: set[int], levels: int) -> None:
        file = self.file
        file.expect(tree, b"TREE")
        level, count = file.number(tree + 5, 1), file.number(tree + 6, 2)
        if tree in seen or level >= levels:
            _fail(f"the names in {self._shown} are endless")
        seen.add(tree)
        for i in range(count):
            child = file.number(tree + 32 + 16 * i, 8)
            if level:
                self._add(child, names, seen, level)
                continue
            file.expect(child, b"SNOD")
            if child in seen:
                _fail(f"the names in {self._shown} are endless")
            seen.add(child)
            for j in range(file.number(child + 6, 2)):
                entry = child + 8 + 40 * j
                begin = file.number(entry, 8)
                end = names.find(b"\0", begin)
                if not 0 < begin < end:
                    _fail(f"a name in {self._shown} is missing")
                link = file.number(entry + 16, 4) == SOFT_LINK
                address = None if link else file.number(entry + 8, 8)
                self._found[names[begin:end].decode("utf-8", "replace")] = address

    def texts(self, name: str) -> list[str] | None:
        """Return the texts in an attribute; None if there is none."""
        for message in self._messages.get(ATTRIBUTE, ()):
            version, place = message[:1], 9 if message[:1] == b"\3" else 8
            parts: list[bytes] = []
            for i in (2, 4, 6):
                length = int.from_bytes(message[i : i + 2], "little")
                parts.append(message[place : place + length])
                place += -(-length // 8) * 8 if version == b"\1" else length
            found, datatype, space = parts
            if found.rstrip(b"\0") == name.encode():
                what = f"attribute {name} of {self._shown}"
                if version not in (b"\1", b"\2", b"\3") or (version != b"\1" and message[1]):
                    _fail(f"{what} is of another version or shared; save the file again with h5py")
                return self._texts(what, datatype, _shape(what, space), message[place:])
        return None

    def _texts(self, what: str, datatype: bytes, shape: Shape, values: bytes) -> list[str]:
        kind, count = datatype[0] & 15 if datatype else -1, prod(shape)
        if count == 0:
            return []  # of any type
        size = int.from_bytes(datatype[4:8], "little")
        varying = kind == 9 and datatype[1] & 15 == 1 and size == 16
        if not varying and (kind != 3 or size == 0):
            _fail(f"{what} must contain names")
        if size * count > len(values):
            _fail(f"{what} is truncated")
        texts = [values[i * size : (i + 1) * size] for i in range(count)]
        if varying:
            limit = len(self.file.data)
            for i, text in enumerate(texts):
                length, place, index = struct.unpack("<IQI", text)
                limit -= length
                if limit < 0:
                    _fail(f"{what} is longer than the file")
                texts[i] = self.file.heap_text(place, index, length)
        return [text.rstrip(b"\0").decode("utf-8", "replace") for text in texts]

    @property
    def shape(self) -> Shape:
        """Shape of an array."""
        return _shape(self._shown, self._message(DATASPACE))

    def reader(self) -> Callable[[], np.ndarray]:
        """Return a function that returns the values of an array, of at most 64 bits each."""
        datatype, layout, shape = self._message(DATATYPE), self._message(LAYOUT), self.shape
        if EXTERNAL in self._messages or layout[:2] == b"\4\3":
            _fail(f"{self._shown} has its values in another file, which is not read; copy them")
        if FILTERS in self._messages or layout[:2] not in (b"\3\0", b"\3\1"):
            _fail(f"{self._shown} is stored in pieces or compressed; save the model again")
        size, precision, exponent, mantissa, bias = (
            int.from_bytes(datatype[a:b], "little")
            for a, b in ((4, 8), (10, 12), (13, 14), (15, 16), (16, 20))
        )
        code = FLOATS.get((size, precision, exponent, mantissa, bias))
        if datatype[0] & 15 != 1 or code is None:
            _fail(f"{self._shown} must contain floating-point numbers, such as float32; convert it")
        dtype = np.dtype((">" if datatype[1] & 1 else "<") + code)
        size = prod(shape) * dtype.itemsize
        if layout[1] == 0:
            values: Buffer = layout[4 : 4 + size]
        else:
            place = int.from_bytes(layout[2:10], "little")
            values = self.file.data[place : place + size] if place != UNDEFINED_ADDRESS else b""
        if len(values) != size:
            _fail(f"{self._shown} has fewer values than its shape {shape}")
        return lambda: np.frombuffer(values, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _shape(what: str, space: bytes) -> Shape:
    """Return the shape in a dataspace."""
    version, axes = space[:1], space[1] if len(space) > 1 else MAX_AXES + 1
    begin = {b"\1": 8, b"\2": 4}.get(version, len(space))
    dims = space[begin : begin + 8 * axes]
    if axes > MAX_AXES or len(dims) != 8 * axes or (version == b"\2" and space[3] == 2):
        _fail(f"{what} has no shape")
    return tuple(int.from_bytes(dims[i : i + 8], "little") for i in range(0, len(dims), 8))


def _fail(problem: str) -> NoReturn:
    raise ValueError(problem)

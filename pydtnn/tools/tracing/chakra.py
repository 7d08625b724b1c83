"""Execution traces of MLCommons Chakra: files of one rank each, with nodes and dependencies.

A file is a sequence of messages of Protocol Buffers, each after its length: `GlobalMetadata`, then
a `Node` for each computation, message or collective. Only the fields below are written; when files
are read, others are skipped, and lists of attributes are.

References
----------
Sridharan et al., Chakra: advancing performance benchmarking and co-design using standardized
execution traces, 2023; schema ``et_def.proto`` of version 0.0.4. Protocol Buffers Encoding,
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydtnn.utils.files import read_file

SCHEMA = "1.0.2-chakra.0.0.4"
"""Version of the schema, which files contain."""

MAX_BYTES, MAX_NODES = 1 << 28, 1_000_000
"""Largest size of a file, in B, and number of nodes of all files, that are read."""

MAX_RANKS = 1024
"""Number of ranks."""

MAX_SECONDS, MAX_MESSAGE = 1e6, 1 << 30
"""Longest duration of a node, in s, and length of a message, in B."""


class NodeType(IntEnum):
    """What a node does."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class Collective(IntEnum):
    """Attribute `comm_type` of a collective."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass
class Node:
    """A node.

    Attributes
    ----------
    id : int
    name : str
    type : NodeType
    data, control : list of int
        Nodes that are complete before it begins; the one before it in its thread.
    start, duration : int
        In us.
    values : str
        Values of its inputs.
    attributes : dict
        Of the types in `FIELDS`.
    """

    id: int = 0
    name: str = ""
    type: NodeType = NodeType.INVALID
    data: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    start: int = 0
    duration: int = 0
    values: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether it is a message or a collective, and not the call of one by a processor."""
        return self.type >= NodeType.COMM_SEND and not self.attributes.get("is_cpu_op")


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Types of fields on the wire."""

FIELDS = {
    "is_cpu_op": 27,  # bool
    "num_ops": 9,  # int64
    "tensor_size": 13,  # uint64, in B
    "comm_type": 9,
    "comm_size": 9,  # in B
    "comm_src": 7,  # int32
    "comm_dst": 7,
    "comm_tag": 7,
    "pg_name": 29,  # string
    "schema": 29,
}
"""Attributes that are written, and the field of `AttributeProto` with their value."""

FORMATS = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}
"""Fields of `AttributeProto` of fixed length."""

INTEGERS, ZIGZAG, BOOL, STRING = (7, 9, 11, 13), (15, 17), 27, 29
"""Other fields of `AttributeProto`; lists are not among them."""


def encode(nodes: Sequence[Node]) -> bytes:
    """Return the content of a file."""
    metadata = _field(1, "0.0.4") + _field(2, _attribute("schema", SCHEMA))
    parts = []
    for part in (metadata, *map(_node, nodes)):
        parts += [_varint(len(part)), part]
    return b"".join(parts)


def _node(node: Node) -> bytes:
    control, data = (b"".join(map(_varint, ids)) for ids in (node.control, node.data))
    text, fields = b"", (node.id, node.name, node.type, control, data, node.start, node.duration)
    for number, value in enumerate(fields, 1):
        assert isinstance(value, int | str | bytes)
        text += _field(number, value) if value else b""
    if node.values:
        text += _field(8, _field(1, node.values))
    return text + b"".join(_field(10, _attribute(*item)) for item in node.attributes.items())


def _attribute(name: str, value: int | str) -> bytes:
    return _field(1, name) + _field(FIELDS[name], value)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def read_nodes(paths: Sequence[str | Path]) -> list[list[Node]]:
    """Read the nodes of all ranks.

    Parameters
    ----------
    paths : sequence of str or Path
        The last number in the name of each is its rank.

    Raises
    ------
    ValueError
        If a file is damaged, or nodes are inconsistent.
    OSError
        If a file cannot be read.
    """
    by_rank: dict[int, Path] = {}
    for path in map(Path, paths):
        numbers = re.findall(r"\d{1,9}", path.name)
        if not numbers or by_rank.setdefault(int(numbers[-1]), path) != path:
            raise ValueError(
                f"trace import: expected a file of each rank, whose number is the last one in its "
                f"name, got {path}"
            )
    if sorted(by_rank) != [*range(len(by_rank))] or len(by_rank) > MAX_RANKS:
        found = ", ".join(map(str, sorted(by_rank)[:8]))
        raise ValueError(
            f"trace import: expected a file of each rank from 0, of at most {MAX_RANKS:,}, got "
            f"{len(by_rank):,} of ranks {found}, ...; name the files of all ranks"
        )
    ranks, left = [], MAX_NODES
    for rank in range(len(by_rank)):
        path = by_rank[rank]
        try:
            nodes = _decode(read_file("trace import", path, MAX_BYTES), left)
            _check_order(nodes)
            for node in nodes:
                _check(node, rank, len(by_rank))
            ranks.append(nodes)
        except (ValueError, struct.error) as error:
            reason = str(error).removeprefix("trace import: ")
            raise ValueError(f"trace import: {path}: {reason}") from error
        left -= len(nodes)
    return ranks


def _decode(data: bytes, most: int) -> list[Node]:
    """Return the nodes of a file, of which there are at most `most`."""
    nodes: list[Node] = []
    end = _message(data, 0)[1]  # GlobalMetadata
    while end < len(data):
        start, end = _message(data, end)
        if len(nodes) == most:
            raise ValueError(f"expected at most {MAX_NODES:,} nodes of all ranks, got more")
        try:
            nodes.append(_parse_node(data[start:end]))
        except ValueError as error:
            raise ValueError(f"the node at byte {start} is damaged ({error})") from error
    if not nodes:
        raise ValueError("expected an execution trace of Chakra, got a file without nodes")
    return nodes


def _message(data: bytes, start: int) -> tuple[int, int]:
    """Return the bounds of a message whose length is at a position."""
    length, start = _read_varint(data, start)
    if length > len(data) - start:
        raise ValueError(
            f"expected {length:,} B at byte {start}, got {len(data) - start:,}; the file is cut "
            "off, or no execution trace of Chakra"
        )
    return start, start + length


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at a position, as uint64, and the position behind it."""
    value = 0
    for place, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, start + place + 1
    raise ValueError(f"expected a number at byte {start}, which does not end; the file is damaged")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        kind, value = key & 7, b""
        if kind == VARINT:
            number, place = _read_varint(data, place)
            yield key >> 3, number
            continue
        if kind == BYTES:
            place, end = _message(data, place)
        elif kind in (FIXED64, FIXED32):
            end = place + (8 if kind == FIXED64 else 4)
        else:
            raise ValueError(f"a field has type {kind}")
        value, place = data[place:end], end
        yield key >> 3, value


NODE = {1: "id", 2: "name", 3: "type", 4: "control", 5: "data", 6: "start", 7: "duration"}
"""Fields of `Node`."""


def _parse_node(data: bytes) -> Node:
    node = Node()
    for number, value in _fields(data):
        if number in (4, 5):
            (node.control if number == 4 else node.data).extend(_numbers(value))
        elif number in NODE:
            setattr(node, NODE[number], _typed(value, str if number == 2 else int))
        elif number == 8:
            for inner, text in _fields(_typed(value, bytes)):
                node.values = _typed(text, str) if inner == 1 else node.values
        elif number == 10:
            name, found = _parse_attribute(_typed(value, bytes))
            node.attributes[name] = found
    node.type = NodeType(node.type)
    return node


def _numbers(value: int | bytes) -> Iterator[int]:
    """Yield the numbers of a repeated field, of which one value may contain several."""
    if isinstance(value, int):
        yield value
        return
    place = 0
    while place < len(value):
        number, place = _read_varint(value, place)
        yield number


def _parse_attribute(data: bytes) -> tuple[str, Any]:
    name, found = "", None
    for number, value in _fields(data):
        if number == 1:
            name = _typed(value, str)
        elif number in FORMATS:
            (found,) = struct.unpack(FORMATS[number], _typed(value, bytes))
        elif number in (*INTEGERS, *ZIGZAG, BOOL):
            found = _typed(value, int)
            if number in ZIGZAG:
                found = found >> 1 ^ -(found & 1)
            elif number != 13 and found >> 63:
                found -= 1 << 64
        elif number == STRING:
            found = _typed(value, str)
    return name, found


def _typed(value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, kind):
        raise ValueError("a field has another type than in its schema")
    return value


def dependents(nodes: Sequence[Node]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return by id of a node those that depend on it, and on how many it depends.

    Only `Node.data` counts: the control dependencies of PyTorch are the operations that contain a
    node, which files may not have.

    Raises
    ------
    ValueError
        If ids are not unique, or a node depends on one that does not exist.
    """
    after: dict[int, list[int]] = {node.id: [] for node in nodes}
    if len(after) < len(nodes):
        raise ValueError(f"expected nodes with different ids, got {len(after)} for {len(nodes)}")
    before = {node.id: {*node.data} for node in nodes}
    for one, needed in before.items():
        for other in needed:
            if other not in after:
                raise ValueError(f"node {one} depends on node {other}, which does not exist")
            after[other].append(one)
    return after, {one: len(needed) for one, needed in before.items()}


def _check_order(nodes: Sequence[Node]) -> None:
    """Raise ValueError if a node depends on itself, through others or not."""
    after, missing = dependents(nodes)
    free = [one for one, count in missing.items() if not count]
    for one in free:
        for other in after[one]:
            missing[other] -= 1
            if not missing[other]:
                free.append(other)
    if len(free) < len(nodes):
        one = min(one for one, count in missing.items() if count)
        raise ValueError(f"node {one} depends on itself, or on one that does")


def _check(node: Node, rank: int, ranks: int) -> None:
    """Raise ValueError if a node is not one that a rank can execute."""
    if node.duration > 1e6 * MAX_SECONDS:
        raise ValueError(
            f"node {node.id}: expected a duration of at most {MAX_SECONDS:g} s, got "
            f"{node.duration / 1e6:g} s"
        )
    limits: Mapping[str, int] = {}
    if not node.communicates:
        return
    if node.type == NodeType.COMM_COLL:
        limits = {"comm_type": len(Collective) - 1, "comm_size": MAX_MESSAGE}
    else:
        peer = "comm_dst" if node.type == NodeType.COMM_SEND else "comm_src"
        limits = {peer: ranks - 1, "comm_size": MAX_MESSAGE, "comm_tag": (1 << 32) - 1}
        node.attributes.setdefault("comm_tag", 0)
        if node.attributes.get(peer) == rank:
            raise ValueError(f"node {node.id} of rank {rank} sends to itself, or receives from it")
    if node.type == NodeType.COMM_COLL and node.attributes.get("comm_type") == Collective.BARRIER:
        node.attributes.setdefault("comm_size", 0)
    for name, largest in limits.items():
        value = node.attributes.get(name)
        if type(value) is not int or not 0 <= value <= largest:
            raise ValueError(
                f"node {node.id}: expected {name} from 0 to {largest:,}, got {value!r:.50}"
            )

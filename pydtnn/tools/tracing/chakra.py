"""Execution traces of MLCommons Chakra: files of one rank each, with nodes and dependencies.

A file is a sequence of messages of Protocol Buffers, each after its length: `GlobalMetadata`, then
a `ChakraNode` for each computation, message or collective. Only the fields below are written.

References
----------
Sridharan et al., Chakra: advancing performance benchmarking and co-design using standardized
execution traces, 2023; schema ``et_def.proto`` of version 0.0.4. Protocol Buffers Encoding,
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

SCHEMA = "1.0.2-chakra.0.0.4"
"""Version of the schema, which files contain."""


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


class CommType(IntEnum):
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
class ChakraNode:
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
    attributes: dict[str, Any] = field(default_factory=dict)


VARINT, BYTES = 0, 2
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


def encode(nodes: Sequence[ChakraNode]) -> bytes:
    """Return the content of a file."""
    metadata = _field(1, "0.0.4") + _field(2, _attribute("schema", SCHEMA))
    parts = []
    for part in (metadata, *map(_node, nodes)):
        parts += [_varint(len(part)), part]
    return b"".join(parts)


def _node(node: ChakraNode) -> bytes:
    control, data = (b"".join(map(_varint, ids)) for ids in (node.control, node.data))
    text, fields = b"", (node.id, node.name, node.type, control, data, node.start, node.duration)
    for number, value in enumerate(fields, 1):
        assert isinstance(value, int | str | bytes)
        text += _field(number, value) if value else b""
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

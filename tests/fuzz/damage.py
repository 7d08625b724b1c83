"""Random damage to files: of bytes, and of what JSON holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Rng = np.random.Generator

WORDS = [b"\0", b"\xff", b"[", b"{", b'"', b"\n", b":", b"-", b"&a *a", b"!!x", b"1e999", b"NaN"]
HUGE = [0xFF, 0x7F, 0x80, 0x01]


def damage(data: bytes, rng: Rng, others: Sequence[bytes]) -> tuple[bytes, str]:
    """Damage bytes in one to three ways; return them and what was done.

    Parameters
    ----------
    data : bytes
    rng : numpy.random.Generator
    others : sequence of bytes
        Contents of other files, parts of which may come in.
    """
    done = []
    for _ in range(rng.integers(1, 4)):
        way = WAYS[rng.integers(len(WAYS))]
        data = way(data, rng, others)
        done.append(way.__name__)
    return data, ", ".join(done)


def _stretch(data: bytes, rng: Rng) -> slice:
    """Draw a part of the data: mostly a short one, often at the beginning."""
    length = len(data) + 1
    size = int(rng.integers(1, 1 + min(length, 1 << int(rng.integers(1, 12)))))
    begin = rng.integers(length) if rng.random() < 0.6 else rng.integers(min(length, 200))
    return slice(int(begin), int(begin) + size)


def cut(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    part = _stretch(data, rng)
    return data[: part.start] + (data[part.stop :] if rng.random() < 0.5 else b"")


def flip(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.integers(1, 9) if changed else 0):
        changed[_stretch(data[:-1], rng).start] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def insert(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    place = _stretch(data, rng).start
    new = WORDS[rng.integers(len(WORDS))] if rng.random() < 0.5 else rng.bytes(rng.integers(1, 40))
    return data[:place] + new * int(rng.choice([1, 1, 1, 2000])) + data[place:]


def duplicate(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    part = _stretch(data, rng)
    return data[: part.stop] + data[part] + data[part.stop :]


def swap(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    first, second = sorted((_stretch(data, rng), _stretch(data, rng)), key=lambda part: part.start)
    if first.stop > second.start:
        return data
    between = data[first.stop : second.start]
    return data[: first.start] + data[second] + between + data[first] + data[second.stop :]


def zero(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    part = _stretch(data, rng)
    return data[: part.start] + bytes(len(data[part])) + data[part.stop :]


def size(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    """Write numbers that are huge where they are sizes."""
    place, length = _stretch(data, rng).start, int(rng.choice([2, 4, 8]))
    new = bytes(rng.choice(HUGE, length).astype(np.uint8))
    return data[:place] + new + data[place + length :]


def mix(data: bytes, rng: Rng, others: Sequence[bytes]) -> bytes:
    other = others[rng.integers(len(others))]
    part = _stretch(data, rng)
    if rng.random() < 0.1:
        return other
    return data[: part.start] + other[part] + data[part.stop :]


WAYS = [cut, flip, insert, duplicate, swap, zero, size, mix]

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e300, 10**30, 10**400),
    *(math.nan, math.inf, -math.inf, "", "x", "\0", "\ud800", "1", "null", [], {}, [[]], {"": {}}),
    *([1] * 3, ["x"] * 3, {"a": 1}, {"a": "b"}, {"a": None}),
]


def change_json(text: bytes, rng: Rng) -> tuple[bytes, str]:
    """Change values of a JSON document: their type, their name, or whether they are there."""
    content = json.loads(text)
    done = []
    for _ in range(rng.integers(1, 4)):
        places = list(_places(content))
        if not places:
            break
        # Half of them near the top, where most depends on them.
        near = [place for place in places if place[2] < 5]
        chosen = near if rng.random() < 0.5 else places
        inside, key, _ = chosen[rng.integers(len(chosen))]
        what = rng.integers(4)
        if what == 0:
            del inside[key]
        elif what == 1 and isinstance(inside, dict):
            inside[key + "x"] = inside.pop(key)
        elif what == 2:
            other, there, _ = places[rng.integers(len(places))]
            inside[key] = json.loads(json.dumps(other[there]))
        else:
            inside[key] = VALUES[rng.integers(len(VALUES))]
        done.append(f"{('drop', 'rename', 'copy', 'set')[what]} {key!r:.40}")
    return json.dumps(content).encode(), ", ".join(done)


def _places(content: Any, depth: int = 0) -> Any:
    """List every place of a value: what it is in, under which key, and how deep."""
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, value in items:
        yield content, key, depth
        yield from _places(value, depth + 1)

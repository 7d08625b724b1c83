"""Position of a parameter in a bucket."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """Position of a parameter in its bucket's flat arrays."""

    name: str
    shape: tuple[int, ...]
    slice: slice
    decay: bool

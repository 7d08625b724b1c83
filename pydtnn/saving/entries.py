"""Checks of the types of entries in JSON objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Expected = dict[str, tuple[Callable[[Any], bool], str]]
"""For each entry of an object, whether a value is valid, and a description of valid ones."""


def check_entries(entry: Any, where: str, expected: Expected) -> None:
    """Check that an object has all entries, with valid values; other entries are ignored.

    Raises
    ------
    ValueError
        The message begins with `where`, and contains the name of the entry.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    for name, (fits, what) in expected.items():
        if name not in entry or not fits(entry[name]):
            raise ValueError(f"{where}: {name} must be {what}")


def is_name(value: object) -> bool:
    """Return whether a value is text that is not empty."""
    return isinstance(value, str) and value != ""


def are_names(value: object) -> bool:
    """Return whether a value is a list of names."""
    return isinstance(value, list) and all(map(is_name, value))


def is_shape(value: object) -> bool:
    """Return whether a value is a list of whole numbers above 0."""
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)


def are_numbers(value: object) -> bool:
    """Return whether a value is a list of finite numbers."""
    return isinstance(value, list) and all(
        type(n) in (int, float) and -1e300 < n < 1e300 for n in value
    )


NAME = (is_name, "a name")
NAMES = (lambda value: are_names(value) and len(value) > 0, "a list of names")
SHAPE = (is_shape, "a list of whole numbers above 0")

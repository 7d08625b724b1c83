"""Representations of objects for people: one line if it fits, otherwise one argument per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy as np

WIDTH = 80
"""Characters of a representation in one line; a longer one has one line per argument."""

MOST, LONGEST = 8, 200
"""Elements of an array, and characters of a value, that are not abbreviated."""


def represent_call(name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Represent a call by its arguments.

    >>> represent_call("Linear", [10], {"bias": False})
    'Linear(10, bias=False)'
    """
    shown = [represent(value) for value in args]
    shown += [f"{key}={represent(value)}" for key, value in keywords.items()]
    return enclose(f"{name}(", shown, ")")


def represent(value: Any) -> str:
    """Represent an argument: arrays are abbreviated, functions and classes are their names.

    >>> print(represent(np.zeros((3, 224, 224))), represent([np.float32(0.5), len]))
    array(shape=(3, 224, 224), dtype=float64) [0.5, len]
    """
    if isinstance(value, np.ndarray):
        if value.size > MOST:
            return f"array(shape={value.shape}, dtype={value.dtype})"
        return f"array({value.tolist()})"
    if isinstance(value, np.generic):
        return repr(value.item())
    if type(value) is list:
        return enclose("[", [represent(part) for part in value], "]")
    if type(value) is tuple:
        return enclose("(", [represent(part) for part in value], ",)" if len(value) == 1 else ")")
    if type(value) is dict:
        return enclose("{", [f"{represent(k)}: {represent(v)}" for k, v in value.items()], "}")
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = repr(value)
    if len(text) > LONGEST and "\n" not in text:
        return f"{text[:LONGEST]}..."
    return text


def enclose(start: str, parts: Sequence[str], end: str) -> str:
    """Join parts in brackets, in one line if it fits, otherwise indented with a line for each.

    >>> print(enclose("f(", ["a" * 50, "b" * 50], ")"))
    f(
        aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa,
        bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb,
    )
    """
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    lines = indent(",\n".join([*parts, ""]), "    ")
    return f"{start}\n{lines}{end.lstrip(',')}"

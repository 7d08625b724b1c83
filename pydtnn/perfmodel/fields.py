"""Dataclasses of physical quantities, from and to mappings of text with units.

A field declares its kind: a quantity with a unit, a whole number, a text, several quantities by
name, or another dataclass. `read` and `write` need no other description of a file's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from pydtnn.utils.names import unknown
from pydtnn.utils.units import format_quantity, parse_quantity
from pydtnn.utils.validate import check_float, check_int

T = TypeVar("T")


def quantity(unit: str, *, default: Any = MISSING, positive: bool = True) -> Any:
    """Declare a number with a unit.

    Parameters
    ----------
    unit : str
        SI unit, a key of `pydtnn.utils.units.UNITS`.
    default : float or None, optional
        Value of a missing entry; without it, the entry is required.
    positive : bool, default True
        Whether zero is refused.
    """
    return field(default=default, metadata={"unit": unit, "positive": positive})


def quantities(unit: str, *, optional: bool = True) -> Any:
    """Declare quantities of one unit by names that are free; none by default if optional."""
    if optional:
        return field(default_factory=dict, metadata={"named": unit})
    return field(metadata={"named": unit})


def count(*, default: Any = MISSING) -> Any:
    """Declare a whole number of at least 1."""
    return field(default=default, metadata={"count": True})


def counts(*, default: Any = MISSING) -> Any:
    """Declare a list of whole numbers of at least 1."""
    return field(default=default, metadata={"counts": True})


def index(*, default: Any = MISSING) -> Any:
    """Declare a whole number of at least 0."""
    return field(default=default, metadata={"count": True, "least": 0})


def positive(*, default: Any = MISSING) -> Any:
    """Declare a number above 0 without a unit."""
    return field(default=default, metadata={"number": True})


def text(*, default: Any = MISSING) -> Any:
    """Declare a text."""
    return field(default=default, metadata={"text": True})


def part(kind: type, *, default: Any = MISSING) -> Any:
    """Declare a dataclass as the value."""
    return field(default=default, metadata={"part": kind})


def parts(kind: type) -> Any:
    """Declare a list of dataclasses; empty by default."""
    return field(default=(), metadata={"parts": kind})


def one_of(kinds: Mapping[str, type]) -> Any:
    """Declare a dataclass of one of several kinds, as an entry of its name; None by default."""
    return field(default=None, metadata={"kinds": kinds})


def read(kind: type[T], content: object, who: str, key: str = "") -> T:
    """Create a dataclass from a mapping.

    Parameters
    ----------
    kind : type
        Dataclass whose fields are declared by the functions of this module.
    content : object
        A mapping, as read from a file.
    who, key : str
        Name of the file and of the entry within it, for errors.

    Raises
    ------
    ValueError
        If an entry is missing, unknown, or has an invalid value.
    """
    if not isinstance(content, Mapping):
        what = f"{key}: expected" if key else "expected"
        raise ValueError(f"{who}: {what} entries 'name: value', got {content!r}; add them")
    declared: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in content.items():
        if name not in declared:
            raise ValueError(f"{who}: {unknown('entry', _join(key, name), _all(key, declared))}")
        values[name] = _value(declared[name], value, who, _join(key, name))
    for name, f in declared.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{who}: expected an entry {_join(key, name)!r}, got none; add it")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{who}: {_join(key, str(error))}") from None


def write(value: Any) -> dict[str, Any]:
    """Return the mapping from which `read` creates an equal object, to 4 significant digits."""
    found = {}
    for f in fields(value):
        own, metadata = getattr(value, f.name), f.metadata
        if own is None or (own in ((), {}) and not metadata.get("count")):
            continue
        if "unit" in metadata:
            own = format_quantity(own, metadata["unit"])
        elif "named" in metadata:
            own = {name: format_quantity(v, metadata["named"]) for name, v in own.items()}
        elif "part" in metadata:
            own = write(own)
        elif "parts" in metadata:
            own = [write(one) for one in own]
        elif "counts" in metadata:
            own = [*own]
        elif "kinds" in metadata:
            own = {
                name: write(own) for name, kind in metadata["kinds"].items() if kind is type(own)
            }
        found[f.name] = own
    return found


def _value(f: Field[Any], value: object, who: str, key: str) -> Any:
    metadata = f.metadata
    if "unit" in metadata:
        return parse_quantity(
            f"{who}: {key}", value, metadata["unit"], positive=metadata["positive"]
        )
    if "named" in metadata:
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{who}: {key}: expected entries 'name: value', got {value!r}; add them"
            )
        return {
            name: parse_quantity(f"{who}: {_join(key, name)}", v, metadata["named"])
            for name, v in value.items()
        }
    if "part" in metadata:
        return read(metadata["part"], value, who, key)
    if "kinds" in metadata:
        kinds = metadata["kinds"]
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(
                f"{who}: {key}: expected one of the entries {', '.join(kinds)}, got {value!r}; "
                "write one"
            )
        [(name, content)] = value.items()
        if name not in kinds:
            raise ValueError(f"{who}: {key}: {unknown('entry', name, kinds)}")
        return read(kinds[name], content, who, _join(key, name))
    if "parts" in metadata or "counts" in metadata:
        if not isinstance(value, list):
            raise ValueError(
                f"{who}: {key}: expected a list, got {value!r}; write one entry a line"
            )
        if "counts" in metadata:
            return tuple(_whole(one, who, f"{key}[{i}]", 1) for i, one in enumerate(value))
        return tuple(
            read(metadata["parts"], one, who, f"{key}[{i}]") for i, one in enumerate(value)
        )
    if "count" in metadata:
        return _whole(value, who, key, metadata.get("least", 1))
    if "number" in metadata:
        try:
            return check_float(who, key, value, above=0)
        except TypeError as error:
            raise ValueError(str(error)) from None
    if not isinstance(value, str):
        raise ValueError(f"{who}: {key} must be text, got {value!r}; quote it")
    return value


def _whole(value: object, who: str, key: str, least: int) -> int:
    try:
        return check_int(who, key, value, at_least=least)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _all(key: str, declared: Mapping[str, object]) -> list[str]:
    return [_join(key, name) for name in declared]

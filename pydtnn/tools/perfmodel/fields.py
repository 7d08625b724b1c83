"""Dataclasses of physical quantities, from and to mappings of text with units.

A field declares its kind: a quantity with a unit, a whole number, a text, several quantities by
name, or another dataclass. `read` and `write` need no other description of a file's content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydtnn.tools.perfmodel.entries import check
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import read_file
from pydtnn.utils.units import format_quantity, parse_quantity
from pydtnn.utils.validate import check_float, check_int

T = TypeVar("T")

Read = Callable[[object, str, str], Any]
"""Returns the value of an entry from its content and the names of the file and of the entry."""


def _declare(read: Read, write: Callable[[Any], Any] = lambda value: value, **default: Any) -> Any:
    return field(metadata={"read": read, "write": write}, **default)


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
    return _declare(
        partial(_quantity, unit, positive), partial(format_quantity, unit=unit), default=default
    )


def _quantity(unit: str, positive: bool, value: object, who: str, key: str) -> float:
    return parse_quantity(f"{who}: {key}", value, unit, positive=positive)


def quantities(unit: str, *, optional: bool = True) -> Any:
    """Declare quantities of one unit by names that are free; none by default if optional."""

    def parse(value: object, who: str, key: str) -> dict[str, float]:
        given = _mapping(value, f"{who}: {key}")
        places = {name: f"{who}: {_join(key, name)}" for name in given}
        return {name: parse_quantity(places[name], v, unit) for name, v in given.items()}

    def form(value: Mapping[str, float]) -> dict[str, str]:
        return {name: format_quantity(v, unit) for name, v in value.items()}

    return _declare(parse, form, **({"default_factory": dict} if optional else {}))


def _checked(check: Callable[..., Any], **limits: float) -> Read:
    """Return a function that reads a number within limits."""

    def parse(value: object, who: str, key: str) -> Any:
        try:
            return check(who, key, value, **limits)
        except TypeError as error:
            raise ValueError(str(error)) from None

    return parse


def _text(value: object, who: str, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{who}: {key} must be text, got {value!r}; quote it")
    return value


def _each(own: Read, value: object, who: str, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{who}: {key}: expected a list, got {value!r}; write one entry a line")
    return tuple(own(one, who, f"{key}[{i}]") for i, one in enumerate(value))


_whole = _checked(check_int, at_least=1)

count = partial(_declare, _whole)
"""Declare a whole number of at least 1; `default` is optional here and in the next four."""

counts = partial(_declare, partial(_each, _whole), list)
"""Declare a list of whole numbers of at least 1."""


def lists(unit: str) -> Any:
    """Declare a list of quantities of one unit; empty by default."""
    return _declare(partial(_each, partial(_quantity, unit, True)), list, default=())


texts = partial(_declare, partial(_each, _text), list)
"""Declare a list of texts."""

index = partial(_declare, _checked(check_int, at_least=0))
"""Declare a whole number of at least 0."""

positive = partial(_declare, _checked(check_float, above=0))
"""Declare a number above 0 without a unit."""

text = partial(_declare, _text)
"""Declare a text."""


def part(kind: type, *, default: Any = MISSING) -> Any:
    """Declare a dataclass as the value."""
    return _declare(partial(read, kind), write, default=default)


def parts(kind: type) -> Any:
    """Declare a list of dataclasses; empty by default."""
    own: Read = partial(read, kind)
    return _declare(partial(_each, own), lambda value: [*map(write, value)], default=())


def one_of(kinds: Mapping[str, type]) -> Any:
    """Declare a dataclass of one of several kinds, as an entry of its name; None by default."""

    def parse(value: object, who: str, key: str) -> object:
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(
                f"{who}: {key}: expected one of the entries {', '.join(kinds)}, got {value!r}; "
                "write one"
            )
        [(name, content)] = value.items()
        check(f"{who}: {key}", "entry", name, kinds)
        return read(kinds[name], content, who, _join(key, name))

    def form(value: Any) -> dict[str, Any]:
        return {name: write(value) for name, kind in kinds.items() if kind is type(value)}

    return _declare(parse, form, default=None)


def load(who: str, path: Path) -> object:
    """Return the content of a YAML file; ValueError if it is not one, OSError if it is not read."""
    try:
        return plain_yaml.load(read_file(who, path, plain_yaml.MAX_B).decode())
    except ValueError as error:  # UnicodeDecodeError included
        raise ValueError(f"{path}: expected a YAML file: {error}; correct it") from error


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
    declared: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, value in _mapping(content, f"{who}: {key}" if key else who).items():
        check(who, "entry", _join(key, name), [_join(key, one) for one in declared])
        values[name] = declared[name].metadata["read"](value, who, _join(key, name))
    for name, f in declared.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{who}: expected an entry {_join(key, name)!r}, got none; add it")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{who}: {_join(key, str(error))}") from None


def write(value: Any) -> dict[str, Any]:
    """Return the mapping from which `read` creates an equal object, to 4 significant digits."""
    given = {f: getattr(value, f.name) for f in fields(value)}
    return {f.name: f.metadata["write"](v) for f, v in given.items() if v not in (None, (), {})}


def _mapping(value: object, who: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{who}: expected entries 'name: value', got {value!r}; add them")
    return value


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name

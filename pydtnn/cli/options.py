"""What an option of the command line is: a field of a dataclass with its help and its limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydtnn.utils.suggest import unknown
from pydtnn.utils.validate import number, whole

PLACEHOLDERS = {int: "N", float: "X", str: "NAME", dict: "JSON"}
"""What stands for a value on the help page, by the option's type."""

EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: 'names and values, such as {"name": 1}',
}


def option(
    group: str, default: Any, help: str, *, metavar: str | None = None, **limits: float
) -> Any:
    """Declare a field of a dataclass that is an option.

    Parameters
    ----------
    group : str
        Where it stands on the help page.
    default : object
    help : str
        What is said of it there.
    metavar : str, optional
        What stands for its value there; by default one of `PLACEHOLDERS`.
    **limits : float
        Of a number, see `pydtnn.utils.validate`.
    """
    metadata = {"group": group, "help": help, "metavar": metavar, "limits": limits}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """A field of a configuration, as the command line and the checks see it.

    Attributes
    ----------
    name : str
    hint : type
        As annotated.
    kind : type
        Of a value that is not None.
    choices : tuple of str
        All values that there are; empty where they cannot be listed.
    default : object
    group, help : str
    metavar : str or None
        What stands for the value on the help page; None where its choices do.
    limits : mapping
        Of a number.
    """

    name: str
    hint: Any
    kind: type
    choices: tuple[str, ...]
    default: Any
    group: str
    help: str
    metavar: str | None
    limits: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return NoneType in get_args(self.hint)

    def check(self, value: Any) -> None:
        """Check a value by itself.

        Raises
        ------
        TypeError, ValueError
            In one sentence that names the option, for another type or a number out of limits.
        """
        if value is None and self.optional:
            return
        if self.kind is int:
            whole("train", self.flag, value, **self.limits)
        elif self.kind is float:
            number("train", self.flag, value, **self.limits)
        elif self.choices:
            if value not in self.choices:
                raise self.wrong_type(value)
        elif not isinstance(value, self.kind):
            raise self.wrong_type(value)
        elif value == "" and self.metavar != "LIST":
            raise ValueError(f"train: {self.flag} must not be empty")
        elif isinstance(value, str) and not _can_be_a_name(value):
            raise ValueError(
                f"train: {self.flag} must not have characters that names of files cannot have, as "
                f"in {value!r}"
            )

    def wrong_type(self, value: Any) -> Exception:
        """Make the error of a value of another type, or of none of the choices."""
        if self.choices:
            return ValueError(unknown(f"value of {self.flag}", str(value), self.choices))
        return TypeError(f"train: {self.flag} must be {EXPECTED[self.kind]}, not {value!r}")


def _can_be_a_name(text: str) -> bool:
    """Whether text has neither the character 0 nor halves of characters."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@cache
def options(config: type) -> dict[str, Option]:
    """Return the options of a configuration by name, in the order of its fields."""
    hints = get_type_hints(config)
    return {f.name: _option(f.name, hints[f.name], f.default, **f.metadata) for f in fields(config)}


def _option(
    name: str, hint: Any, default: Any, *, group: str, help: str, metavar: str | None, limits: Any
) -> Option:
    inner = get_args(hint)[0] if NoneType in get_args(hint) else hint  # X | None
    kind = get_origin(inner) or inner
    choices = get_args(inner) if kind is Literal else ()
    return Option(
        name=name,
        hint=hint,
        kind=kind,
        choices=choices,
        default={} if default is MISSING else default,
        group=group,
        help=help,
        metavar=metavar or PLACEHOLDERS.get(kind),
        limits=limits,
    )

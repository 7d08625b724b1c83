"""What an option of the command line is: an option of a class with its flag and its help."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pydtnn.utils.option import Option, options_of

PLACEHOLDERS = {int: "N", float: "X", str: "NAME", dict: "JSON"}
"""What stands for a value on the help page, by the option's type."""


class Flag(Option):
    """An option of the command line.

    Attributes
    ----------
    group : str
        Where it stands on the help page.
    help : str
        What is said of it there.
    metavar : str
        What stands for its value there; empty where it has none.
    """

    def __init__(self, group: str, help: str, metavar: str | None, *declared: Any) -> None:
        super().__init__(*declared)
        shown = "{" + ",".join(self.choices) + "}" if self.choices else PLACEHOLDERS.get(self.kind)
        self.group = group
        self.help = help
        self.metavar = metavar or shown or ""

    @property
    def label(self) -> str:
        """What it is called on the command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any, who: str = "train") -> Any:
        """Return a value that suits; text must not be empty, unless it is a list."""
        value = super().check(value, "train")
        if value == "" and self.metavar != "LIST":
            raise ValueError(f"train: {self.label} must not be empty")
        if isinstance(value, str) and not _can_be_a_name(value):
            raise ValueError(
                f"train: {self.label} must not have characters that names of files cannot have, as "
                f"in {value!r}"
            )
        return value


def option(
    group: str,
    default: Any,
    help: str,
    *,
    among: Iterable[str] = (),
    metavar: str | None = None,
    **limits: float,
) -> Any:
    """Declare an attribute of a dataclass that is an option of the command line.

    Parameters
    ----------
    group, help, metavar : str
        See `Flag`; by default its choices, or one of `PLACEHOLDERS`, stand for a value.
    default, among, **limits
        See `pydtnn.utils.option.option`.
    """
    return Flag(group, help, metavar, default, among, limits)


def flags(config: type) -> dict[str, Flag]:
    """Return the options of a configuration by name, in the order in which it declares them."""
    return {name: own for name, own in options_of(config).items() if isinstance(own, Flag)}


def _can_be_a_name(text: str) -> bool:
    """Whether text has neither the character 0 nor halves of characters."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False

"""Options of the command line: options of a class with a flag and a help text."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import Any

from pydtnn.utils import plain_yaml
from pydtnn.utils.option import Option, options_of

MODEL, TRAINING, OPTIMIZER, COMMUNICATION, DEVICE, OUTPUT, OBSERVATION, VIRTUAL = GROUPS = (
    "model and data",
    "training",
    "optimizer",
    "communication",
    "device",
    "output",
    "observation",
    "virtual ranks",
)
"""The groups of options, in the order of the help page."""

PLACEHOLDERS = {int: "N", float: "X", str: "NAME", dict: "JSON"}
"""Placeholders of values on the help page, by the option's type."""


class Flag(Option):
    """Option of the command line.

    Attributes
    ----------
    group : str
        Group on the help page.
    help : str
        Description on the help page.
    metavar : str
        Placeholder of the value on the help page; empty if the option has no value.
    """

    def __init__(self, group: str, help: str, metavar: str | None, *declared: Any) -> None:
        super().__init__(*declared)
        shown = "{" + ",".join(self.choices) + "}" if self.choices else PLACEHOLDERS.get(self.kind)
        self.group = group
        self.help = help
        self.metavar = metavar or shown or ""

    @property
    def label(self) -> str:
        """Name on the command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any, who: str = "train") -> Any:
        """Return a validated value; text must not be empty, unless it is a list."""
        value = super().check(value, "train")
        if value == "" and self.metavar != "LIST":
            raise ValueError(f"train: {self.label} must not be empty; set a value or omit it")
        if isinstance(value, str) and not _can_be_a_name(value):
            raise ValueError(
                f"train: {self.label} must contain only characters that file names can have, got "
                f"{value!r}"
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
        See `Flag`; the default placeholder is the list of choices, or one of `PLACEHOLDERS`.
    default, among, **limits
        See `pydtnn.utils.option.option`.
    """
    return Flag(group, help, metavar, default, among, limits)


def flags(config: type) -> dict[str, Flag]:
    """Return the options of a configuration by name, in the order in which it declares them."""
    return {name: own for name, own in options_of(config).items() if isinstance(own, Flag)}


def typed(config: Any, name: str) -> str:
    """Return an option of a configuration as it is typed: ``--epochs 8`` or ``--no-overlap``."""
    own, value = flags(type(config))[name], getattr(config, name)
    if own.kind is bool:
        return own.label if value else f"--no-{own.label[2:]}"
    text = value if isinstance(value, str) else plain_yaml.dump(value)
    return f"{own.label} {shlex.quote(text)}"


def _can_be_a_name(text: str) -> bool:
    """Return whether text contains neither a null character nor lone surrogates."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False

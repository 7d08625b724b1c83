"""Options: class attributes that validate the values assigned to them.

Schemes and the configuration of the command line declare their options with them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_bool, check_float, check_int

EXPECTED = {str: "text", dict: 'names and values, such as {"name": 1}'}
"""Descriptions of types in error messages, for types that are not numbers."""


def option(default: Any, *, among: Iterable[str] = (), **limits: float) -> Any:
    """Declare an option of a class: ``period: int = option(8, at_least=1)``.

    Parameters
    ----------
    default : bool, int, float, str, dict or a type
        Default value; its type is the type of all values. If a type is given, the default is
        None, and values may be None.
    among : iterable of str
        Allowed values of text. Default: any.
    **limits : float
        Limits of a number, see `pydtnn.utils.validate`.
    """
    return Option(default, among, limits)


class Option:
    """Descriptor with one value per object; the default until a value is assigned.

    Attributes
    ----------
    name : str
        Name of the attribute.
    optional : bool
        Whether the value may be None, which is then the default.
    default : object
        Value until one is assigned.
    kind : type
        Type of values other than None.
    choices : tuple of str
        Allowed values; empty if they are not enumerated.
    limits : mapping
        Limits of a number.
    """

    def __init__(self, default: Any, among: Iterable[str], limits: Mapping[str, Any]) -> None:
        self.name = ""
        self.optional = isinstance(default, type)
        self.default = None if self.optional else default
        self.kind = default if self.optional else type(default)
        self.choices = tuple(among)
        self.limits = limits

    @property
    def label(self) -> str:
        """Name of the option in error messages."""
        return self.name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return repr(self.default)  # in signatures of dataclasses

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance).get(self.name, self.default)

    def __set__(self, instance: Any, value: Any) -> None:
        if value is self:  # a dataclass passes the descriptor as default
            value = copy.copy(self.default)
        vars(instance)[self.name] = self.check(value, type(instance).__name__)

    def check(self, value: Any, who: str) -> Any:
        """Return the validated value, converted to the declared type.

        Raises
        ------
        TypeError, ValueError
            If the type is wrong or the value out of range. The message begins with `who`.
        """
        if value is None and self.optional:
            return None
        if self.kind is int:
            return check_int(who, self.label, value, **self.limits)
        if self.kind is float:
            return check_float(who, self.label, value, **self.limits)
        if self.kind is bool:
            return check_bool(who, self.label, value)
        if not isinstance(value, self.kind):
            expected = EXPECTED.get(self.kind, f"a {self.kind.__name__}")
            raise TypeError(f"{who}: {self.label} must be {expected}, got {value!r}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{who}: {unknown(f'value of {self.label}', value, self.choices)}")
        return value


def options_of(cls: type) -> dict[str, Option]:
    """Return the options that a class and its bases declare, by name."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, Option)
    }


def set_options(instance: Any, values: Mapping[str, Any]) -> None:
    """Set options of an object.

    Raises
    ------
    TypeError, ValueError
        If the class does not declare an option, or a value is invalid.
    """
    cls = type(instance)
    for name, value in values.items():
        if name not in options_of(cls):
            raise ValueError(unknown(f"option of {cls.__name__}", name, options_of(cls)))
        setattr(instance, name, value)


def signature_of(cls: type) -> inspect.Signature:
    """Return the signature of a class, with its options in place of ``**options``.

    Parameters of ``__init__`` of a base class that are passed by ``**options`` are included.
    """
    named: dict[str, inspect.Parameter] = {}
    for base in (base for base in cls.__mro__[:-1] if "__init__" in vars(base)):  # but object
        accepted = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        first = not named
        handed_on = [p.kind for p in accepted[-1:]] == [inspect.Parameter.VAR_KEYWORD]
        for parameter in accepted[:-1] if handed_on else accepted:
            if not first:  # it can be passed on by name only
                parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            named.setdefault(parameter.name, parameter)
        if not handed_on:
            return inspect.Signature(list(named.values()))
    for name, option in options_of(cls).items():
        named[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option.default
        )
    return inspect.Signature(list(named.values()))

"""What can be set: an attribute of a class that checks whatever it is set to.

Schemes declare their options so, and so does the configuration of the command line.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pydtnn.utils.suggest import unknown
from pydtnn.utils.validate import number, truth, whole

EXPECTED = {str: "text", dict: 'names and values, such as {"name": 1}'}
"""Values by their type, in words, where they are no numbers."""


def option(default: Any, *, among: Iterable[str] = (), **limits: float) -> Any:
    """Declare an option of a class: ``period: int = option(8, at_least=1)``.

    Parameters
    ----------
    default : bool, int, float, str, dict or a type
        Of its kind are all values. Where it is a type, the default is None, and values may be None.
    among : iterable of str
        Words there are to choose from; any by default.
    **limits : float
        Of a number, see `pydtnn.utils.validate`.
    """
    return Option(default, among, limits)


class Option:
    """A descriptor that holds one value per object, and the default until it is set.

    Attributes
    ----------
    name : str
    optional : bool
        Whether it may be None, which is then the default.
    default : object
    kind : type
        Of a value that is not None.
    choices : tuple of str
        All values that there are; empty where they cannot be listed.
    limits : mapping
        Of a number.
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
        """What the user calls it."""
        return self.name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance).get(self.name, self.default)

    def __set__(self, instance: Any, value: Any) -> None:
        if value is self:  # what a dataclass takes for the default
            value = copy.copy(self.default)
        vars(instance)[self.name] = self.check(value, type(instance).__name__)

    def check(self, value: Any, who: str) -> Any:
        """Return a value that suits, as the type that it should have.

        Raises
        ------
        TypeError, ValueError
            In one sentence that begins with `who`, for another type or a value out of limits.
        """
        if value is None and self.optional:
            return None
        if self.kind is int:
            return whole(who, self.label, value, **self.limits)
        if self.kind is float:
            return number(who, self.label, value, **self.limits)
        if self.kind is bool:
            return truth(who, self.label, value)
        if not isinstance(value, self.kind):
            expected = EXPECTED.get(self.kind, f"a {self.kind.__name__}")
            raise TypeError(f"{who}: {self.label} must be {expected}, not {value!r}")
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
        For one that its class does not declare, and for a value that does not suit.
    """
    cls = type(instance)
    for name, value in values.items():
        if name not in options_of(cls):
            raise ValueError(unknown(f"option of {cls.__name__}", name, options_of(cls)))
        setattr(instance, name, value)


def signature_of(cls: type) -> inspect.Signature:
    """Return how a class is called: its options take the place of ``**options``."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    parameters = list(signature.parameters.values())[1:]  # without self
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        parameters[-1:] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for name, option in options_of(cls).items()
        ]
    return signature.replace(parameters=parameters)

"""What a scheme can be told: an attribute of its class that checks whatever it is set to."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pydtnn.utils.suggest import unknown
from pydtnn.utils.validate import number, whole


def option(default: Any, *, among: Iterable[str] = (), **limits: float) -> Any:
    """Declare an option of a class: ``period: int = option(8, at_least=1)``.

    Parameters
    ----------
    default : bool, int, float or str
        Of its kind are all values.
    among : iterable of str
        Words there are to choose from; any by default.
    **limits : float
        Of a number, see `pydtnn.utils.validate`.
    """
    return Option(default, tuple(among), limits)


class Option:
    """A descriptor that holds one value per object, and the default until it is set."""

    def __init__(self, default: Any, among: tuple[str, ...], limits: dict[str, Any]) -> None:
        self.default = default
        self.among = among
        self.limits = limits
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance).get(self.name, self.default)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = self._checked(type(instance).__name__, value)

    def _checked(self, who: str, value: Any) -> Any:
        kind = type(self.default)
        if kind is int:
            return whole(who, self.name, value, **self.limits)
        if kind is float:
            return number(who, self.name, value, **self.limits)
        if not isinstance(value, kind):
            expected = "true or false" if kind is bool else "a word"
            raise TypeError(f"{who}: {self.name} must be {expected}, not {value!r}")
        if self.among and value not in self.among:
            raise ValueError(f"{who}: {unknown(self.name, value, self.among)}")
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

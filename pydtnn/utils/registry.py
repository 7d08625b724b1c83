"""Registries: conversion of a name to an object such as a loss, an optimizer or a schedule.

All kinds accept a name from the library, ``path/to/file.py:name``, an instance, or a class or
function that returns an instance.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydtnn.utils.imports import import_object
from pydtnn.utils.names import answer, key_of, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """A kind of object that can be specified by name, and the requirements on custom ones.

    Attributes
    ----------
    name : str
        Name of the kind in error messages, such as "optimizer".
    entries : mapping of str to callable
        Factories of the library's objects by name: lower case, words joined by "_".
    base : type
        Base class of instances.
    expected : str
        Description of accepted arguments other than names, for error messages.
    aliases : mapping of str to str, optional
        Alternative names of the entries.
    tool : str, optional
        Name of a tool that has further entries, see `pydtnn.utils.tools`.

    Examples
    --------
    >>> shape = Registry("shape", {"box": lambda width=1: [width]}, list, "a list")
    >>> shape.find("Box").make({"width": 2})
    [2]
    >>> shape.find("box").make({"widht": 2})
    Traceback (most recent call last):
    ValueError: unknown option of box 'widht'; did you mean 'width'?
    """

    name: str
    entries: Mapping[str, Callable[..., T]]
    base: Any
    expected: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    tool: str = ""

    def find(self, given: Any) -> Factory[T]:
        """Find an object or factory by name, or wrap the given one.

        Parameters
        ----------
        given : str, object, callable or Factory
            Name, instance or factory. Names are case-insensitive; spaces, hyphens and underscores
            are equivalent.

        Raises
        ------
        TypeError
            If `given` is neither an instance of this kind nor callable.
        ValueError
            If the name is unknown (the message contains the nearest names), or a file cannot be
            imported.
        """
        if isinstance(given, Factory):
            return given
        target, name = given, getattr(given, "__name__", type(given).__name__)
        who, expected = self.name, f"a name, {self.expected}"
        if isinstance(given, str) and (":" in given or given.endswith(".py")):
            target, name = import_object(given, self.name), given
            who, expected = f"{self.name} {given}", self.expected
        elif isinstance(given, str):
            key = key_of(given)
            name = self.aliases.get(key, key)
            entries = self._entries(name)
            if name not in entries:
                raise ValueError(unknown(self.name, given, entries, self.aliases))
            return Factory(self, name, entries[name], parameters(entries[name]))
        if isinstance(target, self.base):
            return Factory(self, name, target, {}, ready=True)
        kind = target if isinstance(target, type) else type(target)
        other = isinstance(target, type) and not issubclass(target, self.base)
        foreign = not kind.__module__.startswith(("builtins", "pydtnn_own_", "__main__"))
        named = foreign and (other or kind is not target)
        hint = self._hint(key_of(kind.__name__)) if named else ""
        if other or hint or not callable(target):
            raise TypeError(f"{who}: expected {expected}, got {target!r}{hint}")
        return Factory(self, name, target, parameters(target))

    def _entries(self, name: str) -> Mapping[str, Callable[..., T]]:
        """Return the entries, with those of the tool if a name is not among them."""
        if name in self.entries or not self.tool:
            return self.entries
        from pydtnn.utils.tools import find_tool  # it takes longer than all other imports

        tool = find_tool(self.tool)
        return self.entries if tool is None else {**self.entries, **tool.METHODS[self.name]}

    def _hint(self, key: str) -> str:
        """Return what to use instead of an object of another library, if it is known."""
        if self.aliases.get(key, key) in self.entries:
            return f"; use {self.aliases.get(key, key)!r}"
        return answer("values", key)


@dataclass(frozen=True)
class Factory(Generic[T]):
    """Result of `Registry.find`: makes an object with options, or is one that exists.

    Attributes
    ----------
    registry : Registry
        Where it was found.
    name : str
        Name in error messages.
    target : object or callable
        The instance or factory.
    takes : mapping of str to inspect.Parameter
        Parameters of the factory, with those of its base class if it passes ``**kwargs`` on.
    ready : bool
        Whether `target` is an instance.
    """

    registry: Registry[T]
    name: str
    target: Any
    takes: Mapping[str, inspect.Parameter]
    ready: bool = False

    def make(self, options: Mapping[str, Any], *leading: Any, **shared: Any) -> T:
        """Call the factory with the options, or return the instance.

        Parameters
        ----------
        options : mapping
            Keyword arguments set by the user.
        *leading
            Positional arguments, which the user cannot set.
        **shared
            Keyword arguments that the user cannot set; those without a parameter are omitted.

        Raises
        ------
        TypeError
            If the result is not of this kind, or options have wrong types.
        ValueError
            If an option is unknown (the message contains the nearest names) or missing.
        """
        shared = {name: value for name, value in shared.items() if name in self.takes}
        further = list(self.takes.values())[len(leading) :]
        choices = [p.name for p in further if p.name not in shared and p.kind is not p.VAR_KEYWORD]
        for option in options:
            if option not in choices and not any(p.kind is p.VAR_KEYWORD for p in further):
                raise ValueError(unknown(f"option of {self.name}", option, choices))
        if self.ready:
            return self.target
        who, expected = f"{self.registry.name} {self.name}", f"expected {self.registry.expected}"
        try:
            inspect.signature(self.target).bind(*leading, **shared, **options)
        except TypeError as error:  # "missing a required argument: 'value'"
            own = self.name not in self.registry.entries
            raise ValueError(f"{who}: {error}{f'; {expected}' * own}") from None
        try:
            made = self.target(*leading, **shared, **options)
        except TypeError as error:  # usually from Python: "'int' object is not iterable"
            if not options:
                raise
            given = json.dumps(dict(options), default=str)
            raise TypeError(f"{who} {given}: {error}") from error
        if not isinstance(made, self.registry.base):
            raise TypeError(f"{who}: {expected}, got {made!r}")
        return made


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class, including those passed on to a base class."""
    own = dict(inspect.signature(target).parameters)
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    return {**parameters(target.__base__), **own} if hands_on and isinstance(target, type) else own

"""Things by name: how a word of the command line becomes a loss, an optimizer or a schedule.

What can be given is the same for all kinds: a name of the library's, ``path/to/file.py:name``, an
object that is one already, or a class or function that makes one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydtnn.utils.own_code import import_object
from pydtnn.utils.suggest import unknown

T = TypeVar("T")


def key_of(name: str) -> str:
    """Return a name as registries have it: lower case, words joined by "_".

    >>> key_of("Local-SGD")
    'local_sgd'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What can be named, and what one of a user's own must be.

    Attributes
    ----------
    name : str
        Of the kind, for the sentence of an error: "optimizer".
    registry : mapping of str to callable
        What makes those of the library, by name: lower case, words joined by "_".
    base : type
        Of what is one already.
    expected : str
        What else than a name can be given, in words, for the sentence of an error.
    aliases : mapping of str to str, optional
        Other names of the registry's entries.

    Examples
    --------
    >>> shape = Kind("shape", {"box": lambda width=1: [width]}, list, "a list")
    >>> shape.find("Box").make({"width": 2})
    [2]
    >>> shape.find("box").make({"widht": 2})
    Traceback (most recent call last):
    ValueError: unknown option of box 'widht'; did you mean 'width'?
    """

    name: str
    registry: Mapping[str, Callable[..., T]]
    base: Any
    expected: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    def find(self, given: Any) -> Found[T]:
        """Return what is given, by its name or as it is.

        Parameters
        ----------
        given : str, object, callable or Found
            In a name, capitals, spaces and hyphens do not matter.

        Raises
        ------
        TypeError
            If it is neither one of its kind nor what could make one.
        ValueError
            For an unknown name, with the nearest ones, and for a file that cannot be imported.
        """
        if isinstance(given, Found):
            return given
        target, name = given, getattr(given, "__name__", type(given).__name__)
        who, expected = self.name, f"a name, {self.expected}"
        if isinstance(given, str) and (":" in given or given.endswith(".py")):
            target, name = import_object(given, self.name), given
            who, expected = f"{self.name} {given}", self.expected
        elif isinstance(given, str):
            key = key_of(given)
            name = self.aliases.get(key, key)
            if name not in self.registry:
                raise ValueError(unknown(self.name, given, [*self.registry, *self.aliases]))
            return Found(self, name, self.registry[name], parameters(self.registry[name]))
        if isinstance(target, self.base):
            return Found(self, name, target, {}, ready=True)
        other = isinstance(target, type) and not issubclass(target, self.base)
        if other or not callable(target):
            raise TypeError(f"{who}: expected {expected}, not {target!r}")
        return Found(self, name, target, parameters(target))


@dataclass(frozen=True)
class Found(Generic[T]):
    """What was given: one of its kind, or what makes one.

    Attributes
    ----------
    kind : Kind
    name : str
        What it is called in the sentence of an error.
    target : object or callable
    takes : mapping of str to inspect.Parameter
        Parameters of what makes one, with those of its base class where it hands them on.
    ready : bool
        Whether `target` is one, instead of making one.
    """

    kind: Kind[T]
    name: str
    target: Any
    takes: Mapping[str, inspect.Parameter]
    ready: bool = False

    def make(self, options: Mapping[str, Any], *leading: Any, **shared: Any) -> T:
        """Make one with the options, or return it as it is.

        Parameters
        ----------
        options : mapping
            Keyword arguments, as the user gave them.
        *leading
            Leading arguments, which are no options.
        **shared
            Keyword arguments that are no options either; those that it does not take are left out.

        Raises
        ------
        TypeError
            If what was made is not of this kind, or the options are of wrong types.
        ValueError
            For an unknown option, with the nearest ones, and for one that is missing.
        """
        shared = {name: value for name, value in shared.items() if name in self.takes}
        further = list(self.takes.values())[len(leading) :]
        choices = [p.name for p in further if p.name not in shared and p.kind is not p.VAR_KEYWORD]
        for option in options:
            if option not in choices and not any(p.kind is p.VAR_KEYWORD for p in further):
                raise ValueError(unknown(f"option of {self.name}", option, choices))
        if self.ready:
            return self.target
        who, expected = f"{self.kind.name} {self.name}", f"expected {self.kind.expected}"
        try:
            inspect.signature(self.target).bind(*leading, **shared, **options)
        except TypeError as error:  # "missing a required argument: 'value'"
            own = self.name not in self.kind.registry
            raise ValueError(f"{who}: {error}{f'; {expected}' * own}") from None
        try:
            made = self.target(*leading, **shared, **options)
        except TypeError as error:  # of Python itself, as a rule: "'int' object is not iterable"
            if not options:
                raise
            given = json.dumps(dict(options), default=str)
            raise TypeError(f"{who} {given}: {error}") from error
        if not isinstance(made, self.kind.base):
            raise TypeError(f"{who}: {expected}, not {made!r}")
        return made


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of a class and those that it hands on to its base."""
    own = dict(inspect.signature(target).parameters)
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    return {**parameters(target.__base__), **own} if hands_on and isinstance(target, type) else own

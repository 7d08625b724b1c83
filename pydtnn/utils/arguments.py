"""The arguments with which an object was constructed, and representations made from them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.utils.names import InitSignature

MAX_WIDTH = 80
"""Characters of a representation in one line; a longer one has one line per argument."""

MAX_ELEMENTS, MAX_CHARACTERS = 8, 200
"""Elements of an array, and characters of a value, that are not abbreviated."""


def represent_call(name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Represent a call by its arguments.

    >>> represent_call("Linear", [10], {"bias": False})
    'Linear(10, bias=False)'
    """
    shown = [represent(value) for value in args]
    shown += [f"{key}={represent(value)}" for key, value in keywords.items()]
    return enclose(f"{name}(", shown, ")")


def represent(value: Any) -> str:
    """Represent an argument: arrays are abbreviated, functions and classes are their names.

    >>> print(represent(np.zeros((3, 224, 224))), represent([np.float32(0.5), len]))
    array(shape=(3, 224, 224), dtype=float64) [0.5, len]
    """
    if isinstance(value, np.ndarray):
        if value.size > MAX_ELEMENTS:
            return f"array(shape={value.shape}, dtype={value.dtype})"
        return f"array({value.tolist()})"
    if isinstance(value, np.generic):
        return repr(value.item())
    if type(value) is list:
        return enclose("[", [represent(part) for part in value], "]")
    if type(value) is tuple:
        return enclose("(", [represent(part) for part in value], ",)" if len(value) == 1 else ")")
    if type(value) is dict:
        return enclose("{", [f"{represent(k)}: {represent(v)}" for k, v in value.items()], "}")
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = repr(value)
    if len(text) > MAX_CHARACTERS and "\n" not in text:
        return f"{text[:MAX_CHARACTERS]}..."
    return text


def enclose(start: str, parts: Sequence[str], end: str) -> str:
    """Join parts in brackets, in one line if it fits, otherwise indented with a line for each.

    >>> print(enclose("f(", ["a" * 50, "b" * 50], ")"))
    f(
        aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa,
        bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb,
    )
    """
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) <= MAX_WIDTH and "\n" not in line:
        return line
    lines = indent(",\n".join([*parts, ""]), "    ")
    return f"{start}\n{lines}{end.lstrip(',')}"


@dataclass(frozen=True, eq=False, repr=False)
class Construction:
    """A class and the arguments with which it was called; its representation is that call.

    Attributes
    ----------
    kind : type
    args : tuple
    keywords : dict
        Values are stored by reference.
    """

    kind: type
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def bind(self) -> inspect.BoundArguments:
        """Return the arguments by name, without defaults.

        Raises
        ------
        TypeError
            If they do not fit the signature of the class, as those of a copy of another's object.
        """
        return inspect.signature(self.kind).bind(*self.args, **self.keywords)

    def __repr__(self) -> str:
        args, keywords = self._written()
        return represent_call(self.kind.__name__, args, keywords)

    def _written(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as one would write them: without those that equal defaults.

        StoresArguments without a default are positional, if possible, others are keywords.
        """
        try:
            bound = self.bind()
        except TypeError:
            return list(self.args), self.keywords
        positional: list[Any] = []
        named: dict[str, Any] = {}
        parameters = bound.signature.parameters
        starred = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), "")
        for name, value in bound.arguments.items():
            parameter = parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += value
            elif parameter.kind is parameter.VAR_KEYWORD:
                named |= value
            elif parameter.kind is parameter.POSITIONAL_ONLY or (
                parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                and (parameter.default is parameter.empty or bound.arguments.get(starred))
            ):
                positional.append(value)
            elif not _equal(value, parameter.default):
                named[name] = value
        return positional, named


class StoresArguments:
    """Mixin whose objects record the arguments of their construction, and show them.

    Subclasses need no code for it: they need not call ``super().__init__``, and may have any
    signature.

    Examples
    --------
    >>> class Scale(StoresArguments):
    ...     def __init__(self, factor, *, bias=True):
    ...         pass
    >>> Scale(2.0), Scale(factor=2.0, bias=False)
    (Scale(2.0), Scale(2.0, bias=False))
    >>> construction_of(Scale(2.0)).bind().arguments
    {'factor': 2.0}
    """

    __signature__: Any = InitSignature()

    if not TYPE_CHECKING:  # type checkers use the signature of __init__

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            if (args or keywords) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__name__}() takes no arguments")
            made = super().__new__(cls)
            object.__setattr__(made, "_arguments", (args, keywords))  # also if it is frozen
            return made

    def __repr__(self) -> str:
        return repr(construction_of(self))


def construction_of(made: object) -> Construction:
    """Return the call that constructed an object whose class has the mixin `StoresArguments`."""
    args, keywords = vars(made).get("_arguments", ((), {}))
    return Construction(type(made), args, keywords)


def _equal(value: Any, default: Any) -> bool:
    if value is default:
        return True
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # of any type's __eq__, such as that of arrays with several elements
        return False

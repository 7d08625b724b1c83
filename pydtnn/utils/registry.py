"""Things by name: how a word of the command line becomes a loss, an optimizer or a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydtnn.utils.suggest import unknown

T = TypeVar("T")


def key_of(name: str) -> str:
    """Return a name as registries have it: lower case, words joined by "_".

    >>> key_of("Local-SGD")
    'local_sgd'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def create(
    kind: str,
    registry: Mapping[str, Callable[..., T]],
    name: str,
    options: Mapping[str, Any],
    *,
    args: tuple[Any, ...] = (),
    aliases: Mapping[str, str] | None = None,
) -> T:
    """Call the factory called `name` with the options.

    Parameters
    ----------
    kind : str
        What the registry holds, for the sentence of an error: "optimizer".
    registry : mapping of str to callable
        Factories by name: lower case, words joined by "_".
    name : str
        Capitals, spaces and hyphens do not matter.
    options : mapping
        Keyword arguments of the factory, as the user gave them.
    args : tuple, optional
        Leading arguments of the factory, which are no options.
    aliases : mapping of str to str, optional
        Other names of the registry's entries.

    Raises
    ------
    TypeError
        If `name` is no string.
    ValueError
        For an unknown name or option, with the nearest ones, and for an option that is missing.

    Examples
    --------
    >>> create("shape", {"box": lambda width=1: width}, "box", {"widht": 2})
    Traceback (most recent call last):
    ValueError: unknown option of box 'widht'; did you mean 'width'?
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind}: expected one of its kind or a name, not {name!r}")
    key = key_of(name)
    key = (aliases or {}).get(key, key)
    if key not in registry:
        raise ValueError(unknown(kind, name, [*registry, *(aliases or {})]))
    factory = registry[key]
    signature = inspect.signature(factory)
    choices = list(signature.parameters)[len(args) :]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for option in options:
        if option not in choices and not takes_any:
            raise ValueError(unknown(f"option of {key}", option, choices))
    try:
        signature.bind(*args, **options)
    except TypeError as error:  # "missing a required argument: 'value'"
        raise ValueError(f"{kind} {key}: {error}") from None
    return factory(*args, **options)

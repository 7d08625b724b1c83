"""The arguments with which an object was constructed, and representations made from them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pydtnn.utils.represent import represent_call


class _Signature:
    """Class attribute ``__signature__``: the parameters of ``__init__``, as without `Arguments`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # an object that is callable has the signature of its __call__
            raise AttributeError("__signature__")
        own = owner.__init__  # type: ignore[misc]
        if own is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(own)
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # no self


class Arguments:
    """Mixin whose objects record the arguments of their construction.

    Subclasses need no code for it: they need not call ``super().__init__``, and may have any
    signature. Arguments are stored by reference.

    Examples
    --------
    >>> class Scale(Arguments):
    ...     def __init__(self, factor, *, bias=True):
    ...         pass
    >>> Scale(2.0), Scale(factor=2.0, bias=False)
    (Scale(2.0), Scale(2.0, bias=False))
    >>> arguments_of(Scale(2.0)).arguments
    {'factor': 2.0}
    """

    __signature__ = _Signature()

    if not TYPE_CHECKING:  # type checkers use the signature of __init__

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            if (args or keywords) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__name__}() takes no arguments")
            made = super().__new__(cls)
            object.__setattr__(made, "_arguments", (args, keywords))  # also if it is frozen
            return made

    def __repr__(self) -> str:
        args, keywords = written_arguments(self)
        return represent_call(type(self).__name__, args, keywords)


def arguments_of(made: object) -> inspect.BoundArguments:
    """Return the arguments of an object's construction by name, without defaults.

    Raises
    ------
    TypeError
        If they do not fit the signature of the class, as for a copy of another class's object.
    """
    args, keywords = vars(made).get("_arguments", ((), {}))
    return inspect.signature(type(made)).bind(*args, **keywords)


def written_arguments(made: object) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as one would write them: without those that are equal to defaults.

    Parameters without a default are positional, if possible, others are keywords.
    """
    try:
        bound = arguments_of(made)
    except (TypeError, ValueError):
        args, keywords = vars(made).get("_arguments", ((), {}))
        return list(args), dict(keywords)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    parameters = bound.signature.parameters
    starred = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    for name, value in bound.arguments.items():
        parameter = parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= value
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and (parameter.default is parameter.empty or bound.arguments.get(starred or ""))
        ):
            positional.append(value)
        elif not _equal(value, parameter.default):
            named[name] = value
    return positional, named


def _equal(value: Any, default: Any) -> bool:
    if value is default:
        return True
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # of any type's __eq__, such as that of arrays with several elements
        return False

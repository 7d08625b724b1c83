"""Answers to names of other libraries: of modules' members, of attributes and of arguments.

The tables of names, `foreign_members`, `foreign_attributes` and `foreign_arguments`, are used only
if a name is missing: Python calls ``__getattr__`` only then, arguments are first compared with the
signature of ``__init__``, and assignments with the attributes that exist.
"""

from __future__ import annotations

import inspect
import opcode
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from pydtnn.utils.signature import InitSignature
from pydtnn.utils.suggest import unknown

CLASSES = tuple(
    f"pydtnn.{name}"
    for name in ("layers", "optimizers", "losses", "metrics", "schedules", "callbacks", "data")
)
"""Modules whose public classes are members of ``pydtnn``, too."""

IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def suggesting_getattr(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` of a module (PEP 562) that knows names of other libraries.

    A name whose meaning is exactly that of a name of the module is that object; for others the
    error contains the name to use. ``pydtnn`` has the aliases and public classes of its modules.
    """

    def __getattr__(name: str) -> Any:
        from pydtnn.utils.foreign_members import ALIASES, ANSWERS

        home, _, ours = ALIASES.get(name, "").rpartition(".")
        places = CLASSES if name[0].isupper() else ()
        if not ours:
            home, ours = next((h for h in places if name in _classes(h)), ""), name
        if home and module in ("pydtnn", home):
            return getattr(import_module(home), ours)
        sentence = f"module {module!r} has no attribute {name!r}"
        if home:
            sentence += f"; use {home}.{ours}"
        elif name in ANSWERS:
            sentence += f"; {ANSWERS[name]}"
        elif not name.startswith("_"):
            if hasattr(sys.modules[module], "__path__") and find_spec(f"{module}.{name}"):
                # `from package import module` asks here first; the classes may import that module
                return import_module(f"{module}.{name}")
            names = {*getattr(sys.modules[module], "__all__", ()), *_classes(module)}
            if module == "pydtnn":
                names.update(*map(_classes, places))
            _, mark, nearest = unknown("name", name, sorted(names)).partition("; did you mean ")
            sentence += mark + nearest
        raise _error(module, sentence)

    return __getattr__


def aliases_of(module: str) -> list[str]:
    """Return the names of other libraries that are names of a module, for its ``__all__``."""
    from pydtnn.utils.foreign_members import ALIASES

    return [name for name, ours in ALIASES.items() if ours.rpartition(".")[0] == module]


def _classes(module: str) -> list[str]:
    """Return the names of the public classes of a module."""
    home = import_module(module)
    listed = getattr(home, "__all__", ())
    names = vars(home) | {name: getattr(home, name) for name in listed}
    return [
        name
        for name, value in names.items()
        if isinstance(value, type) and (name in listed or value.__module__ == module)
    ]


def _error(module: str, sentence: str) -> ImportError | AttributeError:
    """Return an AttributeError, or within ``from module import name`` an ImportError.

    Python replaces an AttributeError there by an ImportError with a message of its own.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name in ("_error", "__getattr__"):
        frame = frame.f_back
    imports = frame.f_code.co_code[max(frame.f_lasti, 0)] == IMPORT_FROM
    return ImportError(sentence, name=module) if imports else AttributeError(sentence)


class SuggestsNames:
    """Mixin whose missing attributes and wrong arguments are answered with names of this library.

    Notes
    -----
    Stands before other mixins with ``__new__``, which receive the arguments. The methods are hidden
    from type checkers, which would accept any attribute otherwise.
    """

    __signature__ = InitSignature()

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            if args or keywords:
                check_arguments(cls, args, keywords)
            make = super().__new__
            return make(cls) if make is object.__new__ else make(cls, *args, **keywords)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dict__:
                sentence = _refused_assignment(type(self), name)
                if sentence:
                    raise AttributeError(sentence)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised AttributeError: raise it again
                return object.__getattribute__(self, name)
            if not name.startswith("_"):
                from pydtnn.utils.foreign_attributes import ATTRIBUTES

                for answers in _of_classes(type(self), ATTRIBUTES):
                    if name in answers:
                        raise AttributeError(
                            f"{type(self).__name__!r} object has no attribute {name!r}; "
                            f"{answers[name]}"
                        )
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )


class NotCallable(SuggestsNames):
    """`SuggestsNames` for objects that are called in other libraries."""

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
            from pydtnn.utils.foreign_attributes import CALLS

            (answer, *_) = _of_classes(type(self), CALLS)
            raise TypeError(f"{type(self).__name__}: cannot be called; {answer}")


@cache
def _refused_assignment(cls: type, name: str) -> str:
    """Return why a new attribute would have no effect; empty if it may be set."""
    from pydtnn.utils.foreign_attributes import ASSIGNED

    # classes of other modules may have any attributes
    if cls.__module__.startswith("pydtnn.") and not hasattr(cls, name):
        for answers in _of_classes(cls, ASSIGNED):
            if name in answers:
                return f"{cls.__name__}: cannot set {name!r}; {answers[name]}"
    return ""


def _nothing(self: object) -> None:
    """Take no arguments, as ``object.__init__`` does if there is no ``__new__``."""


def check_arguments(cls: type, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError if arguments of a class are too many or have unknown names.

    Missing arguments are reported by Python. Does nothing if ``__init__`` is not a Python function.

    Raises
    ------
    TypeError
        With the argument of this library, or the nearest one.
    """
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    init, owner = (_nothing, cls) if owner is object else (vars(owner)["__init__"], owner)
    code = getattr(inspect.unwrap(init), "__code__", None)
    if code is None:
        return
    from pydtnn.utils.foreign_arguments import ARGUMENTS, POSITIONAL, REFUSED

    who, positional = cls.__name__, code.co_varnames[1 : code.co_argcount]
    twice = [f" and {name}=" for name in positional[: len(args)] if name in keywords]
    refused = args and isinstance(args[0], tuple(_of_classes(owner, REFUSED)))
    many = len(args) > len(positional) and not code.co_flags & inspect.CO_VARARGS
    if many or twice or refused:
        several = f"argument{'s' * (len(positional) > 1)}"
        takes = f"at most {len(positional)} {several} without a name ({', '.join(positional)})"
        given = f"a {type(args[0]).__name__}" if refused else f"{len(args)}{''.join(twice)}"
        hint = next(_of_classes(cls, POSITIONAL), "give the others by name")
        raise TypeError(
            f"{who}: expected {takes if positional else 'no argument without a name'}, "
            f"got {given}; {hint}"
        )
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    for name in keywords:
        if name not in names and not code.co_flags & inspect.CO_VARKEYWORDS:
            for answers in _of_classes(cls, ARGUMENTS):
                if name in answers:
                    raise TypeError(f"{who}: no argument {name!r}; {answers[name]}")
            raise TypeError(unknown(f"argument of {who}", name, names))


def _of_classes(cls: type, table: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a table's entries for a class of this library and its bases."""
    for owner in cls.__mro__:
        if owner.__module__.startswith("pydtnn.") and owner.__name__ in table:
            yield table[owner.__name__]

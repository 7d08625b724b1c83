"""Names that do not exist: the nearest ones, and answers to usual names of other libraries.

The answers are in `foreign_names.toml`, which is read when the first name is missing.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydtnn.utils.moved import RENAMED, renamed

MIN_CONTAINED = 4
"""Length of names from which one that contains another is suggested for it, and the reverse."""

MIN_SIMILARITY = 0.65
"""Ratio of `difflib` from which a name is suggested for another."""

ASSIGNED = frozenset(
    ("learning_rate", "requires_grad", "should_stop", "stop_training", "trainable", "transform")
)
"""Attributes of other libraries, which would have no effect here and cannot be set."""

HOMES = ("layers", "optimizers", "losses", "metrics", "schedules", "callbacks", "data")
"""Modules whose public classes are members of ``pydtnn``, too."""


@cache
def foreign_names() -> dict[str, dict[str, str]]:
    """Return the tables of `foreign_names.toml`: answers by name, as `key_of` returns it.

    >>> foreign_names()["names"]["optim"]
    'use pydtnn.optimizers'
    """
    import tomllib  # takes longer than all other imports of this module

    path = Path(__file__).with_name("foreign_names.toml")
    return {
        table: {key_of(name): given for given, names in lines.items() for name in names.split()}
        for table, lines in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def key_of(name: str) -> str:
    """Return the key of a name in registries: lower case, words joined by "_".

    >>> key_of("Local-SGD")
    'local_sgd'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def answer(table: str, name: str) -> str:
    """Return "; " and what to use instead of a name of another library; empty if not known.

    >>> answer("values", "fp16"), answer("values", "text")
    ("; use 'float16'", '')
    """
    found = foreign_names()[table].get(key_of(name))
    return f"; {found}" if found else ""


def unknown(kind: str, name: str, choices: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a message for an unknown name, with the nearest of `choices`, or all if none is near.

    Values of other libraries are answered as by `answer`. Names in `also` are suggested if they are
    near, but not listed.

    >>> unknown("data set", "cifer10", ["mnist", "cifar10", "cifar100"])
    "unknown data set 'cifer10'; did you mean 'cifar10' or 'cifar100'?"
    >>> unknown("schedule", "xyz", ["constant", "cosine"])
    "unknown schedule 'xyz'; choose one of 'constant', 'cosine'"
    >>> unknown("value of --device", "gpu", ["cpu", "cuda"])
    "unknown value of --device 'gpu'; use 'cuda'"
    """
    choices = [*choices]
    hint = answer("removed", f"{kind} {name}") or answer("values", name)
    hint = hint or _nearest(name, [*also, *choices])
    if not hint and choices:
        hint = f"; choose one of {', '.join(map(repr, sorted(choices)))}"
    return f"unknown {kind} {name!r}{hint or '; there is none to choose from'}"


def _nearest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest names; empty if none is near.

    Names that contain the given one, or are contained in it, precede those of similar spelling.
    Upper case, and the dashes before all options, do not count.
    """
    bare = {choice.lower().lstrip("-"): choice for choice in choices}
    given = name.lower().lstrip("-")
    near = [
        other
        for other in bare
        if min(len(other), len(given)) >= MIN_CONTAINED and (other in given or given in other)
    ]
    near = sorted(near, key=lambda other: abs(len(other) - len(given)))[:3]
    near = near or difflib.get_close_matches(given, bare, n=3, cutoff=MIN_SIMILARITY)
    return f"; did you mean {' or '.join(repr(bare[n]) for n in near)}?" if near else ""


def shorten(items: Sequence[str], most: int = 8) -> str:
    """Return the first few items and the number of the others.

    >>> shorten(["a", "b", "c", "d"], most=2), shorten([])
    ('a, b and 2 more', 'nothing')
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more or "nothing"


# -- members of modules


def module_getattr(module: str, homes: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module (PEP 562).

    A name whose meaning in another library is exactly that of a name of the module, or that differs
    from a class in upper case only, is that object; the error for other names contains the one to
    use. ``pydtnn`` has the classes of all `HOMES`.

    Parameters
    ----------
    module : str
    homes : mapping of str to str, optional
        Names that are imported on first use, and the modules that define them.
    """

    def __getattr__(name: str) -> Any:
        if homes and name in homes:
            value = getattr(import_module(homes[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name in RENAMED.get(module, ()):
            return renamed(module)(name)
        if _is_module(module, name):
            return import_module(f"{module}.{name}")
        home, _, ours = foreign_names()["aliases"].get(key_of(name), "").rpartition(".")
        if home and module in ("pydtnn", home):
            return getattr(import_module(home), ours)
        names: set[str] = set()
        for place in [f"pydtnn.{home}" for home in HOMES] if module == "pydtnn" else [module]:
            public = _public(place)
            same = [one for one in public if one[0].isupper() and one.lower() == name.lower()]
            if same and name[0].isupper() and (place, same[0]) != (module, name):
                return getattr(import_module(place), same[0])
            names |= public
        hint = answer("removed", name) or answer("names", name) or _nearest(name, sorted(names))
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return __getattr__


def _is_module(package: str, name: str) -> bool:
    """Return whether a package contains a module, without importing it."""
    path = getattr(sys.modules[package], "__path__", None)
    return path is not None and PathFinder.find_spec(f"{package}.{name}", path) is not None


def _public(module: str) -> set[str]:
    """Return the public names of a module."""
    members = vars(import_module(module))
    own = {n for n, value in members.items() if getattr(value, "__module__", "") == module}
    return {*members.get("__all__", ()), *own}


# -- attributes and arguments of objects


class InitSignature:
    """Class attribute ``__signature__``: the parameters of ``__init__``, as without ``__new__``."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # an object that can be called has the signature of its __call__
            raise AttributeError("__signature__")
        if owner.__init__ is object.__init__:  # type: ignore[misc]
            return inspect.Signature()
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])  # without self


class SuggestsNames:
    """Mixin whose missing attributes and wrong arguments are answered with names of this library.

    Notes
    -----
    Stands before other mixins with ``__new__``, which receive the arguments. The methods are hidden
    from type checkers, which would accept any attribute otherwise.
    """

    __signature__: Any = InitSignature()

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            if args or keywords:
                check_arguments(cls, args, keywords)
            make = super().__new__
            return make(cls) if make is object.__new__ else make(cls, *args, **keywords)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in ASSIGNED and name not in self.__dict__:
                cls = type(self)
                # classes of other modules may have any attributes
                if cls.__module__.startswith("pydtnn.") and not hasattr(cls, name):
                    hint = answer("names", name)
                    raise AttributeError(f"{cls.__name__}: cannot set {name!r}{hint}")
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            cls = type(self)
            if hasattr(cls, name):  # a property has raised AttributeError: raise it again
                return object.__getattribute__(self, name)
            sentence = f"{cls.__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and (hint := answer("names", name)):
                raise AttributeError(sentence + hint)
            raise AttributeError(sentence, name=name, obj=self)


class NotCallable(SuggestsNames):
    """`SuggestsNames` for objects that are called in other libraries."""

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
            raise TypeError(f"{type(self).__name__}: cannot be called{answer('names', 'call()')}")


def _takes_nothing(self: object) -> None:
    """Take no arguments, as ``object.__init__`` does if there is no ``__new__``."""


def check_arguments(cls: type, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError if arguments of a class are too many or have unknown names.

    Missing arguments are reported by Python. Does nothing if ``__init__`` is not a Python function.

    Raises
    ------
    TypeError
        With the argument of this library, or the nearest one.
    """
    init = _takes_nothing if cls.__init__ is object.__init__ else inspect.unwrap(cls.__init__)  # type: ignore[misc]
    code = getattr(init, "__code__", None)
    if code is None:
        return
    who, positional = cls.__name__, code.co_varnames[1 : code.co_argcount]
    twice = [f" and {name}=" for name in positional[: len(args)] if name in keywords]
    many = len(args) > len(positional) and not code.co_flags & inspect.CO_VARARGS
    if many or twice:
        several = f"argument{'s' * (len(positional) > 1)}"
        takes = f"at most {len(positional)} {several} without a name ({', '.join(positional)})"
        raise TypeError(
            f"{who}: expected {takes if positional else 'no argument without a name'}, "
            f"got {len(args)}{''.join(twice)}"
            f"{answer('names', f'{who}()') or '; give the others by name'}"
        )
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        check_names(cls, keywords, names)


def check_names(cls: type, keywords: Iterable[str], names: Sequence[str]) -> None:
    """Raise TypeError if a keyword argument of a class has none of the names.

    Raises
    ------
    TypeError
        See `check_arguments`.
    """
    for name in keywords:
        if name not in names:
            if hint := answer("names", name):
                raise TypeError(f"{cls.__name__}: no argument {name!r}{hint}")
            raise TypeError(unknown(f"argument of {cls.__name__}", name, names))


def select(who: str, patterns: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that match any of the patterns, in their order.

    A pattern is the name of a parameter, of a layer or of a block that contains it, or has the
    wildcards of `fnmatch`, which also match dots.

    Parameters
    ----------
    who : str
        First word of the error.
    patterns : sequence of str
    names : iterable of str
        Dotted names of parameters, such as "stage1.0.conv1.w".

    Raises
    ------
    TypeError, ValueError
        If a pattern is not a string, or matches no name.

    Examples
    --------
    >>> names = ["stem.w", "stage1.0.w", "stage1.0.b", "head.w"]
    >>> select("freeze", ["stage1", "stem"], names)
    ('stem.w', 'stage1.0.w', 'stage1.0.b')
    >>> select("freeze", ["*.b"], names)
    ('stage1.0.b',)
    """
    names = tuple(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{who}: expected names of layers as text, got {pattern!r}")
        if not any(matches(pattern, name) for name in names):
            parts = [prefixes(name) for name in names]
            near = unknown("layer", pattern, dict.fromkeys(part for own in parts for part in own))
            if "did you mean" not in near:
                near = unknown("layer", pattern, dict.fromkeys(own[0] for own in parts))
            raise ValueError(f"{who}: {near}")
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a parameter, or of a layer that contains it.

    >>> matches("stage?.0", "stage1.0.w"), matches("stage1", "stage10.w")
    (True, False)
    """
    return any(fnmatchcase(part, pattern) for part in prefixes(name))


def prefixes(name: str) -> list[str]:
    """Return the names of all blocks that contain a parameter, of its layer, and its own.

    >>> prefixes("stage1.0.w")
    ['stage1', 'stage1.0', 'stage1.0.w']
    """
    return list(accumulate(name.split("."), "{}.{}".format))

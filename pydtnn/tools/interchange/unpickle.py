"""Safe reading of the pickles in files of PyTorch.

A pickle is a program for a stack machine with a memo: it may call any function, nest objects so
deeply that hashing them overflows the C stack, and declare sizes that exceed the memory. Here, only
the instructions of plain data are executed. The names that NumPy writes for an
array of bytes are replaced by classes that check their arguments; any other name raises an error. A
pickle can therefore only create arrays of bytes, strings, numbers, lists and dictionaries. For
tensors, the converter of PyTorch's files passes other replacements, and lets objects of other names
be `Skipped`.
"""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

Names = Mapping[tuple[str, str], Any]
"""Replacements of the objects that a pickle may refer to, by module and name.

Classes and functions may be called by the pickle, with any arguments; other values may not.
"""

PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "PERSID", "BINPERSID"),
)
"""Instructions that are left to Python's library."""


def _code(name: str) -> int:
    code: bytes = getattr(pickle, name)
    return code[0]


class PickledDict(dict[Any, Any]):
    """A dictionary whose keys have no parts, so that hashing them needs no stack; bytes are str."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | int | float | Skipped | None):
            raise ValueError(f"a key that is not a string but of type {type(key).__name__}")
        super().__setitem__(key.decode("latin1") if isinstance(key, bytes) else key, value)


class Skipped:
    """Replacement of an object of another name, which ignores what it is called with or given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> Skipped:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def extend(self, items: list[Any]) -> None:
        """Ignore items."""


class Lenient(dict[tuple[str, str], Any]):
    """Replacements of which other names get one, too: they are `Skipped`."""

    def __missing__(self, key: tuple[str, str]) -> Skipped:
        return self.setdefault(key, Skipped(".".join(key)))


class UnsafePickle(Exception):
    """The pickle contains a name that is not plain data."""


DAMAGED = (
    *(ValueError, TypeError, LookupError, OverflowError),
    *(pickle.UnpicklingError, EOFError, AttributeError, struct.error),
)
"""Errors of the instructions of a pickle that is damaged."""


def run_pickle(
    stream: BinaryIO, names: Names, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the object of the pickle at the position of a stream, and move behind its end.

    Parameters
    ----------
    stream : file
        Of bytes in memory, so that a size that the pickle declares is not allocated.
    names : mapping
    persistent : callable, optional
        Returns the object outside the pickle that an identifier belongs to.

    Raises
    ------
    UnsafePickle
        If the pickle contains another name or instruction, or an object outside it.
    ValueError, ...
        If it is damaged; `DAMAGED` contains the types.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the strings of a damaged pickle
        return _PickleMachine(stream, names, persistent).load()


_LIBRARY: Any = pickle._Unpickler
"""The interpreter in Python; that in C allocates memory for the largest number of the memo."""


class _Instructions(dict[int, Callable[[Any], None]]):
    """The functions of instructions by their code; others are refused."""

    def __missing__(self, code: int) -> Any:
        raise UnsafePickle(f"an object made by the instruction {code:#x}")


class _PickleMachine(_LIBRARY):
    """The interpreter of Python's library in Python, with the instructions of plain data only."""

    def __init__(
        self, stream: BinaryIO, names: Names, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(stream, encoding="bytes")
        self.names, self.persistent = names, persistent
        self.kinds = (Skipped, *(kind for kind in names.values() if isinstance(kind, type)))

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name."""
        try:
            return self.names[module, name]
        except KeyError:
            raise UnsafePickle(f"{module}.{name}") from None

    def persistent_load(self, identifier: Any) -> Any:
        """Return an object outside the pickle."""
        if self.persistent is None:
            raise UnsafePickle("an object outside the file")
        return self.persistent(identifier)

    def load_build(self) -> None:
        """Give a state to a replacement, and to no other object: that would set attributes."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], self.kinds):
            raise ValueError("a state of an object that has none")
        self.stack[-1].__setstate__(state)  # type: ignore[attr-defined]

    def load_dict(self) -> None:
        """Make a dictionary of keys and values."""
        items, made = self.pop_mark(), PickledDict()
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[key] = value
        self.append(made)

    def load_empty_dictionary(self) -> None:
        """Make a dictionary."""
        self.append(PickledDict())

    dispatch = _Instructions({code: _LIBRARY.dispatch[code] for code in map(_code, PLAIN)})
    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_DICT[0]: load_empty_dictionary,
        pickle.NEWOBJ[0]: _LIBRARY.load_reduce,
    }


def one_line(error: Exception) -> str:
    """Return the message of an error in one short line; it may contain text of the pickle."""
    text = " ".join(str(error).split())
    return text if len(text) < 200 else f"{text[:200]}..."

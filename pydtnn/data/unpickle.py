"""Safe reading of pickles: those of CIFAR, and those in the files of PyTorch.

A pickle is a program for a stack machine with a memo: it may call any function, nest objects so
deeply that hashing them overflows the C stack, and declare sizes that exceed the memory. The
interpreter here implements only the instructions of plain data. The names that NumPy writes for an
array of bytes are replaced by classes that check their arguments; any other name raises an error. A
pickle can therefore only create arrays of bytes, strings, numbers, lists and dictionaries. For
tensors, the converter of PyTorch's files passes other replacements, and lets objects of other names
be `Skipped`.
"""

from __future__ import annotations

import io
import math
import pickletools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pydtnn.utils.files import read_file


class _Array:
    """Replacement of ``numpy.ndarray`` and of the function that creates an empty array."""

    def __init__(self, *empty: object) -> None:
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if (
            not isinstance(dtype, _ByteType)
            or not isinstance(data, bytes)
            or any(type(length) is not int or length < 0 for length in shape)
            or len(data) != math.prod(shape)
        ):
            raise ValueError("an array with the wrong number of bytes for its shape")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Replacement of ``numpy.dtype``, for unsigned bytes only."""

    def __init__(self, code: str | bytes, *flags: object) -> None:
        if not isinstance(code, str | bytes) or code not in ("u1", b"u1"):
            given = repr(code) if isinstance(code, str | bytes) else "another kind"
            raise ValueError(f"an array of {given}")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which do not apply to bytes."""


Names = Mapping[tuple[str, str], Any]
"""Replacements of the objects that a pickle may refer to, by module and name.

Classes and functions may be called by the pickle, with any arguments; other values may not.
"""

STANDINS: Names = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _ByteType,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}

CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
"""Instructions that push their argument."""

STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
"""Strings of Python 2: bytes, which `pickletools` decodes as Latin-1."""

TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


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


DAMAGED = (ValueError, TypeError, LookupError, OverflowError)
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
    Refused
        If the pickle contains another name, or an object outside it.
    ValueError, TypeError, LookupError, OverflowError
        If it is damaged; `DAMAGED` contains them.
    """
    return _PickleMachine(names, persistent).run(stream)


class _PickleMachine:
    """Interpreter of a pickle, with one method call per instruction."""

    def __init__(self, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self.names, self.persistent = names, persistent
        self.kinds = (Skipped, *(kind for kind in names.values() if isinstance(kind, type)))
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the strings of a damaged pickle
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "STOP":
                    break
                self.do(opcode.name, argument)
        (result,) = self.stack
        return result

    def do(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in VALUES:
            push(argument)
        elif name in STRINGS:
            push(argument.encode("latin1"))
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            push(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            push([] if name == "EMPTY_LIST" else {})
        elif name == "LIST":
            push(self.since_mark())
        elif name == "DICT":
            items = self.since_mark()
            push(self.filled({}, items))
        elif name in ("EMPTY_TUPLE", "TUPLE"):
            push(tuple(self.since_mark()) if name == "TUPLE" else ())
        elif name in TUPLES:
            push(tuple(self.popped(TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            items = self.popped(1) if name == "APPEND" else self.since_mark()
            self.top(list, Skipped).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self.popped(2) if name == "SETITEM" else self.since_mark()
            self.filled(self.top(dict, Skipped), items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, found = argument.split(" ", 1) if argument else self.popped(2)
            if not isinstance(module, str) or not isinstance(found, str):
                raise ValueError("a name that is not a string")
            try:
                push(self.names[module, found])
            except KeyError:
                raise UnsafePickle(f"{module}.{found}") from None
        elif name == "REDUCE" or (name == "NEWOBJ" and isinstance(self.names, Lenient)):
            kind, arguments = self.popped(2)
            if not callable(kind) or not isinstance(arguments, tuple):
                raise ValueError("a call of an object that is not a function")
            push(kind(*arguments))
        elif name == "BUILD":
            (state,) = self.popped(1)
            self.top(*self.kinds).__setstate__(state)
        elif name == "BINPERSID" and self.persistent is not None:
            push(self.persistent(*self.popped(1)))
        elif name not in ("PROTO", "FRAME"):
            what = "outside the file" if "PERSID" in name else f"made by {name}"
            raise UnsafePickle(f"an object {what}")

    def popped(self, count: int) -> list[Any]:
        """Pop `count` values from the stack, down to the last mark at most."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def since_mark(self) -> list[Any]:
        """Pop all values after the last mark."""
        items = self.stack[self.marks[-1] :]
        del self.stack[self.marks.pop() :]
        return items

    def top(self, *kinds: type) -> Any:
        """Return the last value without removing it."""
        if not isinstance(self.stack[-1], kinds):
            raise ValueError("an update of an object that is not a list or dictionary")
        return self.stack[-1]

    def filled(self, into: Any, items: list[Any]) -> Any:
        """Add alternating keys and values; keys have no parts, so hashing is safe."""
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int | float | Skipped | None):
                raise ValueError(f"a key that is not a string but of type {type(key).__name__}")
            into[key.decode("latin1") if isinstance(key, bytes) else key] = value
        return into


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays of bytes, strings, numbers and lists.

    Parameters
    ----------
    path : Path
        Written by Python 2 or 3. Keys are returned as str, other strings of Python 2 as bytes.

    Raises
    ------
    ValueError
        If the pickle contains anything else, such as a function call, or is damaged.
    """
    program = read_file("cifar", path)
    try:
        content = run_pickle(io.BytesIO(program), STANDINS)
    except UnsafePickle as error:
        raise ValueError(
            f"{path}: expected only arrays, strings and numbers, got a pickle that refers to "
            f"{one_line(error)}; nothing was executed: delete the file and download it from a "
            "trusted source"
        ) from None
    except DAMAGED as error:
        raise ValueError(
            f"{path}: expected a pickle, but it cannot be read ({one_line(error)}); the file is "
            "truncated or damaged: delete it and download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a pickled dictionary, got {type(content).__name__}")
    return {
        name: value.values if isinstance(value, _Array) else value
        for name, value in content.items()
    }


def one_line(error: Exception) -> str:
    """Return the message of an error in one short line; it may contain text of the pickle."""
    text = " ".join(str(error).split())
    return text if len(text) < 200 else f"{text[:200]}..."

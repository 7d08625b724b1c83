"""Reading the pickles of CIFAR without trusting them.

A pickle is a program: it may name any function and have it called. Here it may name what NumPy
writes for an array of bytes, and gets a stand-in that checks what it is given; every other name is
refused before it is looked up. So a pickle builds arrays of bytes, strings, numbers, lists and
dictionaries, or nothing.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray


class _Array:
    """Stands in for ``numpy.ndarray`` and for the function that makes an empty one."""

    def __init__(self, *empty: object) -> None:
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if (
            not isinstance(dtype, _ByteType)
            or not isinstance(data, bytes)
            or len(data) != math.prod(shape)
        ):
            raise ValueError("an array that does not fit its shape")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Stands in for ``numpy.dtype``, of which only the unsigned byte is known."""

    def __init__(self, code: str | bytes, *flags: object) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"an array of {code!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment say nothing about bytes."""


STANDINS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _ByteType,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


class _Refused(Exception):
    """The pickle names something that is not data."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return STANDINS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, identifier: object) -> NoReturn:
        raise _Refused("an object outside the file")


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays of bytes, strings, numbers and lists.

    Parameters
    ----------
    path : Path
        Written by Python 2 or 3. Keys come back as str, strings of Python 2 as bytes.

    Raises
    ------
    ValueError
        If the pickle wants anything else, such as to run code, or is damaged.
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except _Refused as error:
        raise ValueError(
            f"{path}: the pickle asks for {error}, and data files may hold only arrays, strings "
            "and numbers; nothing was run: delete the file and get it from where you can trust it."
        ) from None
    except OSError:
        raise
    except Exception as error:  # by pickle's documentation a damaged file may raise anything
        raise ValueError(
            f"{path}: no readable pickle ({' '.join(str(error).split())}); the file is truncated "
            "or damaged: delete it and get it again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a pickled dictionary; found {type(content).__name__}.")
    found = {}
    for key, value in content.items():
        name = key.decode("latin1") if isinstance(key, bytes) else str(key)
        found[name] = value.values if isinstance(value, _Array) else value
    return found

"""What the headers of NVIDIA's libraries say, to compare our numbers and prototypes with."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pydtnn.kernels.cuda.libraries import Library, Unavailable, load

POINTERS = re.compile(r"\*|Handle_t|Descriptor_t|Stream_t")
WIDTHS = {"int64_t": 8, "long long int": 8, "long long": 8, "size_t": 8, "int": 4, "float": 4}
NAME = re.compile(r"(?<=[\s*])\w+(\[\w*\])?$")


def installed(name: str) -> Library:
    """Load a library, or skip the test."""
    try:
        return load(name)
    except Unavailable as error:
        pytest.skip(str(error))


def header(library: Library, pattern: str) -> str:
    """Text of the headers beside a library, without comments; skip the test where there are none.

    Parameters
    ----------
    library : Library
    pattern : str
        Of the files' names.
    """
    folder = Path(library.path).resolve().parents[1] / "include"
    text = "".join(path.read_text() for path in sorted(folder.glob(pattern)))
    if not text:
        pytest.skip(f"the headers of {library} are not in {folder}")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def numbers(text: str) -> dict[str, int]:
    """Values of all enumerations, by name."""
    found = re.findall(r"\b([A-Z]\w+)(?:\s+\w+_DEPRECATED_ENUM)?\s*=\s*(-?\d+)", text)
    return {name: int(value) for name, value in found}


def check_prototypes(prototypes: Mapping[str, tuple[Any, ...]], text: str) -> None:
    """Every argument has the size that it has in the header, and a pointer is a pointer."""
    for name, arguments in prototypes.items():
        found = re.search(rf"\b{name}\(([^)]*)\)\s*;", text)
        assert found, f"{name} is not in the headers"
        declared = [" ".join(argument.split()) for argument in found[1].split(",")]
        assert len(declared) == len(arguments), name
        for argument, ours in zip(declared, arguments, strict=True):
            assert ctypes.sizeof(ours) == width(argument), f"{name}: {argument}"
            pointer = bool(POINTERS.search(argument) or "[" in argument)
            assert pointer == is_pointer(ours), f"{name}: {argument}"


def width(argument: str) -> int:
    """Bytes of an argument ``const int64_t count``; enumerations are ints."""
    if POINTERS.search(argument) or "[" in argument:
        return 8
    return WIDTHS.get(NAME.sub("", argument).removeprefix("const ").strip(), 4)


def is_pointer(kind: Any) -> bool:
    return kind is ctypes.c_void_p or hasattr(kind, "contents")

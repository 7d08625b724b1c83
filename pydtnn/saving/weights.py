"""A model's weights in a safetensors file, which other programs can read too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.model.load_report import LoadReport
from pydtnn.utils.files import read_file, write_file
from pydtnn.utils.names import shorten
from pydtnn.utils.validate import check_bool
from pydtnn.utils.version import __version__

if TYPE_CHECKING:
    from pydtnn.model import Model


from typing import Any

Expected = dict[str, tuple[Callable[[Any], bool], str]]
"""For each entry of an object, whether a value is valid, and a description of valid ones."""


def check_entries(entry: Any, where: str, expected: Expected) -> None:
    """Check that an object has all entries, with valid values; other entries are ignored.

    Raises
    ------
    ValueError
        The message begins with `where`, and contains the name of the entry.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    for name, (fits, what) in expected.items():
        if name not in entry or not fits(entry[name]):
            raise ValueError(f"{where}: {name} must be {what}")


def is_name(value: object) -> bool:
    """Return whether a value is text that is not empty."""
    return isinstance(value, str) and value != ""


def are_names(value: object) -> bool:
    """Return whether a value is a list of names."""
    return isinstance(value, list) and all(map(is_name, value))


def is_shape(value: object) -> bool:
    """Return whether a value is a list of whole numbers above 0."""
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)


def are_numbers(value: object) -> bool:
    """Return whether a value is a list of finite numbers."""
    return isinstance(value, list) and all(
        type(n) in (int, float) and -1e300 < n < 1e300 for n in value
    )


TYPES: dict[str, np.dtype] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2"), "C64": np.dtype("c8")},
    **{f"{k}{8 * size}": np.dtype(f"{k.lower()}{size}") for k in "IU" for size in (1, 2, 4, 8)},
    "BOOL": np.dtype("?"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Types of elements by the names of safetensors."""

CODES = {dtype.name: code for code, dtype in TYPES.items()}

MAX_HEADER_B, MAX_AXES = 64 << 20, 64
"""Limits of what is read of files that others may have written."""

SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types that are converted to float32."""

NAME = (is_name, "a name")
NAMES = (lambda value: are_names(value) and len(value) > 0, "a list of names")
SHAPE = (is_shape, "a list of whole numbers above 0")


WEIGHTS = "weights.safetensors"
"""Name of the file in the folder of a saved model."""

BEST = "best.safetensors"
"""Name of the file with the best weights in the folder of a run."""

A = TypeVar("A")

Rules = Mapping[str, str | None]
Rename = Rules | Callable[[str], str | None]
"""New names of the arrays in a file, see `load_weights`."""


def save_weights(model: Model, path: str | Path) -> None:
    """Write a model's parameters and running statistics, named as in `Model.state`.

    The same weights give the same bytes: the file contains no time, path or number of ranks. Its
    metadata contain a checksum, which `load_weights` verifies. With several ranks, call it on one
    of them; on a mesh, call `Model.state` on all ranks, and `write_weights` on one of them.

    Parameters
    ----------
    model : Model
    path : str or Path
        Usually ends in ".safetensors"; replaced atomically.

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is not changed.
    """
    write_weights(model.state(), path)


def write_weights(state: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write parameters and running statistics, the result of `Model.state`: see `save_weights`."""
    write_file("save_weights", path, encode_weights(state))


def load_weights(
    model: Model, path: str | Path, *, strict: bool = True, rename: Rename | None = None
) -> LoadReport:
    """Read a model's parameters and running statistics.

    Parameters
    ----------
    model : Model
        Numbers are rounded to its dtype if the file has another.
    path : str or Path
        A file, or the folder of a saved model (`Trainer.save`) or of a run, whose best weights are
        read.
    strict : bool
        Whether names and shapes must be those of the model. Otherwise the arrays that fit are
        loaded, such as those of all layers but a new head, and the report lists the others.
    rename : mapping or callable, optional
        New names of the arrays in the file; None instead of a name skips the array. A callable
        receives each name and returns the new one. A mapping replaces the first parts of dotted
        names, by its first key that matches: ``{"backbone": "body"}``; ``{"backbone": ""}`` removes
        and ``{"": "backbone"}`` adds such a prefix.

    Returns
    -------
    LoadReport
        The names that were loaded, missing, unexpected or of another shape; ``print`` shows it.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    TypeError
        If `rename` is neither a mapping nor a callable, or does not return names.
    ValueError
        If it is not a safetensors file, is truncated, does not match its checksum (files of other
        programs have none), does not fit the model (without `strict`: none of its arrays fits), or
        contains values other than finite floating-point numbers in the range of the model's dtype,
        or if `rename` matches no array or gives two the same name; the model is not changed.
    """
    check_bool("load_weights", "strict", strict)
    inside = [file for name in (WEIGHTS, BEST) if (file := Path(path) / name).is_file()]
    data = read_file("load_weights", inside[0] if inside else path)
    try:
        arrays = decode_weights(data)
        arrays = arrays if rename is None else renamed(arrays, rename)
        fits = model.whole.compare(arrays)
        used = arrays if strict else fits.loaded
        fits.check(strict=strict, advise=bool(fits.loaded))
        check_numbers({name: arrays[name] for name in used}, model.dtype)
        return model.load(arrays, strict=strict)
    except TypeError as error:
        raise TypeError(f"load_weights: {path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"load_weights: {path}: {error}") from error


def encode_weights(state: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a weights file, with a checksum."""
    return encode(state, f"{__version__} {_checksum(state)}")


def decode_weights(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a weights file.

    Raises
    ------
    ValueError
        If it is not a valid safetensors file, or does not match its checksum.
    """
    arrays = decode(data)
    _check_sum(data, arrays)
    return {name: widened(array) for name, array in arrays.items()}


def widened(array: np.ndarray) -> np.ndarray:
    """Return an array, one of `SHORT` elements as float32."""
    return array.astype(np.float32) if array.dtype.name in SHORT else array


def check_numbers(arrays: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
    """Check that arrays are valid weights of a model of a dtype.

    Raises
    ------
    ValueError
        If they contain values other than finite floating-point numbers in the range of the dtype.
    """
    dtype = arithmetic(dtype)
    for name, array in arrays.items():
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ValueError(
                f"{name} must contain floating-point numbers, such as float32, got {array.dtype}; "
                "convert it"
            )
        with np.errstate(over="ignore"):
            bad = array[~np.isfinite(array.astype(dtype, copy=False))]
        if len(bad) and np.isfinite(bad[0]):
            raise ValueError(f"{name} must be in the range of {dtype}, got {bad[0]}; use float64")
        if len(bad):
            raise ValueError(f"{name} must be finite, got {bad[0]}; load another file")
        if name.endswith(".running_variance") and (array < 0).any():
            raise ValueError(f"{name} must be at least 0, got {array.min()}; load another file")


def encode(arrays: Mapping[str, np.ndarray], about: str = __version__) -> bytes:
    """Return the content of a safetensors file; equal arrays give equal bytes.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    about : str
        Value of "pydtnn" in the metadata.
    """
    entries: dict[str, object] = {"__metadata__": {"pydtnn": about}}
    content: list[Any] = []
    offset = 0
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        array = np.asarray(arrays[name], order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        end = offset + array.nbytes
        entries[name] = entry_of(array.dtype.name, array.shape, offset, end)
        content.append(array.reshape(-1).view(np.uint8))
        offset = end
    return b"".join([encode_header(entries), *content])


def entry_of(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    """Return the entry of an array in the header of a safetensors file."""
    return {"dtype": CODES[dtype], "shape": [*shape], "data_offsets": [begin, end]}


def encode_header(entries: Mapping[str, object]) -> bytes:
    """Return what precedes the arrays in a safetensors file; they begin at multiples of 8 B."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file's content.

    Raises
    ------
    ValueError
        If it is invalid, truncated, or has elements of a type that NumPy does not support.
    """
    arrays = {}
    for one in read_entries(memoryview(data)[: 8 + MAX_HEADER_B], len(data)):
        array = np.frombuffer(data, one.dtype, math.prod(one.shape), one.offset)
        arrays[one.name] = array.reshape(one.shape)
    return arrays


class TensorEntry(NamedTuple):
    """An array in a safetensors file, and its offset in B."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Length, in B."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_entries(start: bytes | memoryview, size: int) -> list[TensorEntry]:
    """Return the arrays in a safetensors file, in the order of their offsets.

    Parameters
    ----------
    start : bytes or memoryview
        The file, or its beginning: at least the header, if that is not too long.
    size : int
        Length of the file, in B.

    Raises
    ------
    ValueError
        If it is invalid or truncated.
    """
    begin = 8 + int.from_bytes(start[:8], "little")
    try:
        if not 8 <= begin <= len(start):
            raise ValueError("its header is not complete")
        content = json.loads(bytes(start[8:begin]))
        content.pop("__metadata__", None)
        found = [_entry(name, entry, begin) for name, entry in content.items()]
        entries = sorted(found, key=lambda one: (one.offset, one.nbytes))
        end = begin
        for one in entries:
            if one.offset != end:
                raise ValueError(f"{one.name} must follow the array before it")
            end += one.nbytes
        if end != size:
            raise ValueError(f"it must have {end:,} B by its header, got {size:,} B")
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"not a safetensors file, or truncated ({error})") from error
    return entries


def _entry(name: str, entry: Mapping[str, Any], begin: int) -> TensorEntry:
    shape, (first, last) = entry["shape"], entry["data_offsets"]
    if len(shape) > MAX_AXES or any(
        type(n) is not int or not 0 <= n < 1 << 62 for n in (*shape, first, last)
    ):
        raise ValueError(f"invalid numbers of {name}")
    if entry["dtype"] not in TYPES:
        raise ValueError(
            f"expected elements of a type that NumPy supports, got {entry['dtype']}; convert them "
            "to float32"
        )
    found = TensorEntry(name, TYPES[entry["dtype"]], tuple(shape), begin + first)
    if last - first != found.nbytes:
        raise ValueError(f"wrong length of {name}")
    return found


def renamed(arrays: Mapping[str, A], rename: Rename) -> dict[str, A]:
    """Return the arrays by their new names, without those whose new name is None."""
    if callable(rename):
        pairs = [(old, rename(old)) for old in arrays]
    elif isinstance(rename, Mapping):
        pairs = _by_prefix(list(arrays), rename)
    else:
        raise TypeError(f"rename must be a mapping of names or a callable, got {rename!r}")
    result: dict[str, A] = {}
    origin: dict[str, str] = {}
    for old, new in pairs:
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename must give {old} a name or None, got {new!r}")
        if new in result:
            raise ValueError(
                f"rename must give each array a name of its own, got {new} for {origin[new]} and "
                f"{old}"
            )
        result[new], origin[new] = arrays[old], old
    return result


def _by_prefix(names: Sequence[str], rules: Rules) -> list[tuple[str, str | None]]:
    """Return each name and its new one, by the first prefix that it has."""
    if wrong := [part for part in (*rules, *rules.values()) if not isinstance(part, str | None)]:
        raise TypeError(
            f"rename must have names as keys and values, got {wrong[0]!r}; use a function"
        )
    unused, pairs = {**rules}, list[tuple[str, str | None]]()
    for name in names:
        new: str | None = name
        for key, value in rules.items():
            prefix = key.rstrip(".")
            if not prefix or f"{name}.".startswith(f"{prefix}."):
                parts = ((value or "").rstrip("."), name[len(prefix) :].lstrip("."))
                new = None if value is None else ".".join(filter(None, parts))
                unused.pop(key, None)
                break
        pairs.append((name, new))
    for key in unused:
        raise ValueError(f"rename: {key!r} matches none of the arrays {shorten(names)}")
    return pairs


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a checksum of names, types, shapes and elements."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return f"sha256:{total.hexdigest()}"


def _check_sum(data: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare the arrays with the checksum in the file's metadata, if any.

    Earlier versions wrote only the version; any other value is treated as a damaged checksum.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    for name, value in metadata.items():
        _, space, checksum = value.partition(" ")
        has_checksum = space if name == "pydtnn" else "sha256:" in value
        if has_checksum and checksum != _checksum(arrays):
            raise ValueError(
                "the weights do not match the checksum; the file is damaged: download it again or "
                "load another one"
            )

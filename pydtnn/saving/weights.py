"""A model's weights in a safetensors file, which other programs can read too."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ml_dtypes
import numpy as np

from pydtnn import __version__
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.model.load_report import LoadReport
from pydtnn.utils.files import read_file, write_file
from pydtnn.utils.names import some
from pydtnn.utils.validate import check_bool

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


TYPES = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "C64": "c8", "BOOL": "?"},
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
"""Types of elements by the names of safetensors."""

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

Rules = Mapping[str | re.Pattern[str], str | None]
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
        New names of the arrays in the file; None instead of a name skips the array. A mapping is
        applied by its first key that matches: a string replaces the first parts of dotted names
        (``{"backbone": "body"}``, ``{"backbone": ""}`` removes and ``{"": "backbone"}`` adds such a
        prefix), a compiled pattern is replaced wherever it occurs, as by `re.sub`. A callable
        receives each name and returns the new one.

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
        used = arrays if strict else model.whole.compare(arrays).loaded
        check_numbers({name: arrays[name] for name in used}, model.dtype)
        return model.load(arrays, strict=strict)
    except TypeError as error:
        raise TypeError(f"load_weights: {path}: {error}") from error
    except (ValueError, re.error) as error:  # the latter by a replacement of `rename`
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
    for name, array in arrays.items():
        _check_numbers(name, array, arithmetic(dtype))


def encode(arrays: Mapping[str, np.ndarray], about: str = __version__) -> bytes:
    """Return the content of a safetensors file; equal arrays give equal bytes.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    about : str
        Value of "pydtnn" in the metadata.
    """
    from safetensors.numpy import save  # imported only to read or write files

    # A single entry of metadata: safetensors writes several in an order that changes from run to
    # run. C order, because safetensors writes an array's memory regardless of strides.
    return save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()},
        metadata={"pydtnn": about},
    )


def decode(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file's content.

    Raises
    ------
    ValueError
        If it is invalid, truncated, or has elements of a type that NumPy does not support.
    """
    from safetensors import SafetensorError, deserialize

    try:
        return {
            name: np.frombuffer(entry["data"], TYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in deserialize(data)
        }
    except KeyError as error:
        raise ValueError(
            f"expected elements of a type that NumPy supports, got {error.args[0]}; convert them "
            "to float32"
        ) from error
    except SafetensorError as error:
        reason = str(error).rpartition("deserializing: ")[2]
        raise ValueError(f"not a safetensors file, or truncated ({reason})") from error


def renamed(arrays: Mapping[str, A], rename: Rename) -> dict[str, A]:
    """Return the arrays by their new names, without those whose new name is None."""
    if callable(rename):
        pairs = [(old, rename(old)) for old in arrays]
    elif isinstance(rename, Mapping):
        pairs = _by_rules(list(arrays), rename)
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


def _by_rules(names: Sequence[str], rules: Rules) -> list[tuple[str, str | None]]:
    """Return each name and its new one, by the first rule that matches it."""
    unused = {**rules}
    pairs: list[tuple[str, str | None]] = []
    for name in names:
        new: str | None = name
        for key, value in rules.items():
            if _matches(key, name):
                new = value if value is None else _replaced(key, value, name)
                unused.pop(key, None)
                break
        pairs.append((name, new))
    for key in unused:
        shown = key.pattern if isinstance(key, re.Pattern) else key
        raise ValueError(f"rename: {shown!r} matches none of the arrays {some(names)}")
    return pairs


def _matches(key: str | re.Pattern[str], name: str) -> bool:
    if isinstance(key, re.Pattern):
        return key.search(name) is not None
    if not isinstance(key, str):
        raise TypeError(f"rename must have names or patterns as keys, got {key!r}")
    prefix = key.rstrip(".")
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _replaced(key: str | re.Pattern[str], value: str, name: str) -> str:
    """Apply a rule that matches a name."""
    if not isinstance(value, str):
        raise TypeError(f"rename must have names or None as values, got {value!r}")
    if isinstance(key, re.Pattern):
        return key.sub(value, name)
    rest = name[len(key.rstrip(".")) :].lstrip(".")
    return ".".join(part for part in (value.rstrip("."), rest) if part)


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


def _check_numbers(name: str, array: np.ndarray, dtype: np.dtype) -> None:
    """Raise ValueError if elements are not valid weights of this type."""
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

"""A model's weights in a safetensors file, which other programs can read too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pydtnn import __version__
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.utils.files import read_file, write_file

if TYPE_CHECKING:
    from pydtnn.model import Model


def save_weights(model: Model, path: str | Path) -> None:
    """Write a model's parameters and running statistics, named as in `Model.state`.

    The same weights give the same bytes: the file contains no time, path or number of ranks. Its
    metadata contain a checksum, which `load_weights` verifies. With several ranks, call it on one
    of them.

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
    write_file("save_weights", path, encode_weights(model.state()))


def load_weights(model: Model, path: str | Path) -> None:
    """Read a model's parameters and running statistics.

    Parameters
    ----------
    model : Model
        Numbers are rounded to its dtype if the file has another.
    path : str or Path

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ValueError
        If it is not a safetensors file, is truncated, does not match its checksum (files of other
        programs have none), does not fit the model, or contains values other than finite
        floating-point numbers in the range of the model's dtype; the model is not changed.
    """
    data = read_file("load_weights", path)
    try:
        model.load(decode_weights(data, model.dtype))
    except ValueError as error:
        raise ValueError(f"load_weights: {path}: {error}") from error


def encode_weights(state: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a weights file, with a checksum."""
    return encode(state, f"{__version__} {_checksum(state)}")


def decode_weights(data: bytes, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the arrays of a weights file for a model of a dtype.

    Raises
    ------
    ValueError
        If it is not a valid safetensors file, does not match its checksum, or contains values other
        than finite floating-point numbers in the range of the dtype.
    """
    arrays = decode(data)
    _check_sum(data, arrays)
    for name, array in arrays.items():
        _check_numbers(name, array, arithmetic(dtype))
    return arrays


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
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except KeyError as error:
        raise ValueError(
            f"expected elements of a type that NumPy supports, got {error.args[0]}; convert them "
            "to float32"
        ) from error
    except SafetensorError as error:
        reason = str(error).rpartition("deserializing: ")[2]
        raise ValueError(f"not a safetensors file, or truncated ({reason})") from error


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
        told = space if name == "pydtnn" else "sha256:" in value
        if told and checksum != _checksum(arrays):
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

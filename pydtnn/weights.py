"""A model's weights in a safetensors file, which other programs can read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pydtnn import __version__
from pydtnn.files import read_file, write_file

if TYPE_CHECKING:
    from pydtnn.model import Model


def save_weights(model: Model, path: str | Path) -> None:
    """Write a model's parameters and running statistics, named as in `Model.state`.

    The same weights give the same bytes: no time, path or number of ranks is in the file. With
    several ranks, call it on one of them.

    Parameters
    ----------
    model : Model
    path : str or Path
        Usually ends in ".safetensors"; replaced at once, so that it is never half-written.

    Raises
    ------
    OSError
        If the file cannot be written; what was there before is left as it was.
    """
    write_file("save_weights", path, encode(model.state()))


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
        If it is no safetensors file, is cut short, or does not fit the model, naming what
        differs; the model is left as it was.
    """
    data = read_file("load_weights", path)
    try:
        model.load(decode(data))
    except ValueError as error:
        raise ValueError(f"load_weights: {path}: {error}") from error


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a safetensors file; equal arrays give equal bytes."""
    from safetensors.numpy import save  # only those who read or write files pay for the import

    # A single entry of metadata: safetensors writes several in an order that changes from run to
    # run. C order, because safetensors takes an array's memory as it lies.
    return save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()},
        metadata={"pydtnn": __version__},
    )


def decode(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file's content.

    Raises
    ------
    ValueError
        If it is none, is cut short, or has elements of a type that NumPy does not know.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except KeyError as error:
        raise ValueError(
            f"it has elements of type {error.args[0]}, which NumPy does not know; convert them to "
            "float32"
        ) from error
    except SafetensorError as error:
        reason = str(error).rpartition("deserializing: ")[2]
        raise ValueError(f"this is no safetensors file, or it is cut short ({reason})") from error

"""Weights of Keras in HDF5 files."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.interchange.matching import StateDictReport, fit
from pydtnn.interchange.slots import slots_of
from pydtnn.saving.weights import check_numbers
from pydtnn.utils.files import read_file
from pydtnn.utils.optional import import_optional
from pydtnn.utils.validate import truth

if TYPE_CHECKING:
    from pydtnn.model import Model

WHO = "load_keras_weights"

SUFFIXES = (".h5", ".hdf5")
"""Of the files, which the command line recognises by them."""

NAMES = {
    "kernel": "weight",
    "depthwise_kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
"""PyTorch's names of the arrays of Conv2D, DepthwiseConv2D, Dense and BatchNormalization."""


def load_keras_weights(model: Model, path: str | Path, *, strict: bool = True) -> StateDictReport:
    """Load weights that Keras has saved in an HDF5 file (``.h5``) by layer and name.

    Layers are matched as by `load_state_dict`: by names if more than half of the model's have a
    counterpart of the same name, and otherwise by order, separately for each kind. Features behind
    Flatten have the same order here and in Keras.

    Parameters
    ----------
    model : Model
        Numbers are rounded to its dtype if the file has another.
    path : str or Path
        Written by ``save_weights`` or ``save`` of Keras 2, or of `tf_keras`; files
        ``.weights.h5`` of Keras 3 have no names of arrays.
    strict : bool
        As for `load_state_dict`.

    Returns
    -------
    StateDictReport
        With names such as "conv2d_1.weight", and shapes, as in PyTorch.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ImportError
        If h5py is not installed.
    ValueError
        If it is damaged, has a layer with other arrays than Conv2D, DepthwiseConv2D, Dense and
        BatchNormalization have, does not fit the model, or contains values that are not valid
        weights; the model is not changed.
    """
    truth(WHO, "strict", strict)
    h5py = import_optional("h5py", "h5py", f"{WHO}: reading {Path(path).suffix}")
    data = read_file(WHO, path)
    try:
        try:
            with h5py.File(io.BytesIO(data)) as file:
                arrays = _arrays(file.get("model_weights", file))
        except (OSError, KeyError, RuntimeError, AttributeError) as error:
            raise ValueError(
                "expected the layers and arrays of a file that Keras 2 has saved, got one that is "
                f"damaged or another ({type(error).__name__})"
            ) from error
        slots = [
            replace(slot, order=None, their_shape=slot.their_shape if slot.filters else slot.shape)
            for slot in slots_of(model)
        ]
        report, given = fit(slots, arrays, strict=strict)
        check_numbers(given, model.dtype)
    except ValueError as error:
        raise ValueError(f"{WHO}: {path}: {error}") from error
    model.load(given, strict=strict)
    return report


def _arrays(group: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a file in the order of the layers, with PyTorch's names and layouts.

    The name of an array contains that of its layer, also if it is that of a network in another.
    """
    arrays: dict[str, np.ndarray] = {}
    for outer in map(_text, group.attrs["layer_names"]):
        for name in map(_text, group[outer].attrs["weight_names"]):
            layer, _, what = name.partition(":")[0].rpartition("/")
            if what not in NAMES:
                raise ValueError(
                    f"{name} must be one of {', '.join(NAMES)}, the arrays of Conv2D, "
                    f"DepthwiseConv2D, Dense and BatchNormalization, got {what}"
                )
            theirs = f"{(layer or outer).replace('/', '.')}.{NAMES[what]}"
            if theirs in arrays:
                raise ValueError(f"{name}: names of layers must be unique, got two; rename one")
            arrays[theirs] = _converted(what, np.asarray(group[outer][name]))
    return arrays


def _converted(what: str, array: np.ndarray) -> np.ndarray:
    """Return an array in PyTorch's layout."""
    if what == "depthwise_kernel" and array.ndim == 4:
        kh, kw, channels, multiplier = array.shape
        filters = channels * multiplier
        return array.transpose(2, 3, 0, 1).reshape(filters, 1, kh, kw)  # (C, M, kh, kw) before
    if what == "kernel":
        axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(array.ndim, range(array.ndim))
        return array.transpose(*axes)
    return array


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)

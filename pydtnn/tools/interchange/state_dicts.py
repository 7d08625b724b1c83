"""Weights of a model in the names and layouts of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.saving.weights import Rename, check_numbers, renamed
from pydtnn.tools.interchange.files import read_state_dict, series_of, write_state_dict
from pydtnn.tools.interchange.matching import COUNTER, Match, StateDictReport, fit, match
from pydtnn.tools.interchange.published_names import named_as_in, parts_of
from pydtnn.tools.interchange.slots import slots_of
from pydtnn.utils.names import shorten
from pydtnn.utils.validate import check_bool

if TYPE_CHECKING:
    from pydtnn.model import Model

Source = str | Path | Mapping[str, Any]
"""A file, or tensors or arrays by name."""


def load_state_dict(
    model: Model, source: Source, *, strict: bool = True, rename: Rename | None = None
) -> StateDictReport:
    """Load the parameters and running statistics of a network of PyTorch or torchvision.

    Layouts are converted: filters, and matrices behind `Flatten`, have the channels in another
    place. Arrays are matched by names or by order, see `match`; all of them are checked before the
    first one is loaded.

    Parameters
    ----------
    model : Model
        Numbers are rounded to its dtype if the state dict has another.
    source : str, Path or mapping
        A file ``.safetensors``, or of ``torch.save`` (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), the
        index ``.index.json`` of several in its folder, or tensors or arrays by name. Objects other
        than tensors are skipped.
    strict : bool
        Whether every array must have a counterpart of the same shape. Otherwise those that do are
        loaded, such as those of all layers but a new head, and the report lists the others.
    rename : mapping or callable, optional
        New names of the arrays of the state dict before they are matched, see
        `pydtnn.weights.load_weights`.

    Returns
    -------
    StateDictReport
        The names that were matched, a table of what did not fit, and which objects were skipped;
        ``print`` shows it.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ValueError
        If it is damaged or contains no tensors, does not fit the model (without
        `strict`: none of its arrays fits), or contains values other than finite floating-point
        numbers in the range of the model's dtype; the model is not changed.
    """
    who = "load_state_dict"
    check_bool(who, "strict", strict)
    skipped: list[str] = []
    arrays = read_state_dict(who, source, skipped)
    where = who if isinstance(source, Mapping) else f"{who}: {source}"
    try:
        arrays = arrays if rename is None else renamed(arrays, rename)
        report, given = fit(
            slots_of(model), arrays, strict=strict, series=series_of(source, arrays)
        )
        check_numbers(given, model.dtype)
    except (TypeError, ValueError) as error:
        other = f"; skipped, without executing anything: {shorten(skipped, 4)}" if skipped else ""
        raise type(error)(f"{where}: {error}{other}") from error
    model.load(given, strict=strict)
    return replace(report, skipped=tuple(dict.fromkeys(skipped)))


def state_dict(
    model: Model, *, like: Source | None = None, names: str | None = None
) -> dict[str, np.ndarray]:
    """Return parameters and running statistics in the names and layouts of PyTorch.

    Parameters
    ----------
    model : Model
        On a mesh the call is collective: all ranks call it.
    like : str, Path or mapping, optional
        State dict of the module that shall load the result, in any form that `load_state_dict`
        accepts: the result has its names, in its order. By default names are those of the layers
        here, with PyTorch's names of parameters: "conv1.weight", "bn1.running_var".
    names : {"torchvision", "timm", "hugging_face", "nanogpt"}, optional
        Library whose names and layouts the result has instead, such as those of GPT-2, Llama, BERT
        and T5 of Hugging Face; without second copies of arrays.

    Returns
    -------
    dict of str to ndarray
        Of float64 for a float64 model, otherwise of float32; counts of batches, which the model
        does not have, are 0. ``torch.from_numpy`` converts them.

    Raises
    ------
    ValueError
        If `like` does not fit the model, the library has no such network, or both are given.
    """
    slots, state = slots_of(model), model.state()
    if names is not None:
        if like is not None:
            raise ValueError("state_dict: like and names exclude each other; omit one of them")
        try:
            slots = named_as_in(names, slots)
        except ValueError as error:
            raise ValueError(f"state_dict: {error}") from error
    dtype = arithmetic(model.dtype)
    pairs, order = {slot.name: slot.their_name for slot in slots}, None
    arrays: dict[str, np.ndarray] = {}
    found: Match | None = None
    if like is not None:
        theirs = read_state_dict("state_dict", like)
        shapes = {name: array.shape for name, array in theirs.items()}
        try:
            found = match(slots, shapes, series=series_of(like, theirs))
            found.report.check(strict=True)
            arrays = {name: theirs[name].read() for name in found.constants}
        except ValueError as error:
            raise ValueError(f"state_dict: like: {error}") from error
        pairs, order, slots = found.report.pairs, list(theirs), found.slots
    for slot in slots:
        name = pairs[slot.name]
        array = slot.to_theirs(state[slot.name]).astype(dtype, order="C")
        if name in arrays and not np.array_equal(arrays[name], array):
            raise ValueError(
                f"state_dict: {slot.name} must be equal to the other arrays that are {name} there, "
                "which is one; got other values"
            )
        parts = parts_of(name)
        arrays |= zip(parts, np.split(array, len(parts)), strict=True)
        layer, _, what = name.rpartition(".")
        if what == "running_var":
            arrays[f"{layer}.{COUNTER}" if layer else COUNTER] = np.array(0, np.int64)
    if found is not None:
        arrays |= {copy: arrays[pairs[name]].copy() for copy, name in found.copies.items()}
    return arrays if order is None else {name: arrays[name] for name in order if name in arrays}


def save_state_dict(
    model: Model, path: str | Path, *, like: Source | None = None, names: str | None = None
) -> None:
    """Write the result of `state_dict` to a file, which is replaced atomically.

    With several ranks, call it on one of them.

    Parameters
    ----------
    model : Model
    path : str or Path
        Its suffix determines the format: ``.safetensors``, or that of ``torch.save`` for ``.pt``,
        ``.pth``, ``.bin`` and ``.ckpt``, which requires PyTorch.
    like, names
        See `state_dict`.

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is not changed.
    ImportError
        If the format requires PyTorch and it is not installed.
    ValueError
        If the suffix is another one, or as for `state_dict`.
    """
    write_state_dict("save_state_dict", path, state_dict(model, like=like, names=names))

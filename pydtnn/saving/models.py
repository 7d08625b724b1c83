"""Save a model in a folder, and load it without its code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.data.inputs import Input, Inputs
from pydtnn.data.statistics import Statistics
from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.dtypes import DTYPES
from pydtnn.layers.base import Shape
from pydtnn.layers.statistics import RUNNING
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.saving.folder import MODEL, read_model, write_model
from pydtnn.saving.network import SavedNetwork, layers_to_json
from pydtnn.saving.weights import (
    NAME,
    NAMES,
    SHAPE,
    WEIGHTS,
    Expected,
    are_numbers,
    check_entries,
    check_numbers,
    decode_weights,
    encode_weights,
)
from pydtnn.utils.errors import describe
from pydtnn.utils.files import parse_object
from pydtnn.utils.names import shorten
from pydtnn.utils.version import __version__

TASKS = ("", "classes", "labels", "numbers")
"""What an output predicts, see `pydtnn.losses.Loss.task`."""

RAW = ("uint8", "float16", "float32", "float64")
"""Types of samples before normalisation; others are saved as float64."""


def inputs_to_json(inputs: Sequence[tuple[str, Shape]], known: Inputs | None) -> dict[str, Any]:
    """Convert names and shapes of the inputs of a model, and what is known of their samples."""
    known = Inputs(()) if known is None else known
    samples: list[Any] = [
        {
            "dtype": part.dtype if part.dtype in RAW else "float64",
            "mean": None if part.statistics is None else part.statistics.mean.tolist(),
            "std": None if part.statistics is None else part.statistics.std.tolist(),
            "range": None if part.range is None else list(part.range),
        }
        for part in known.parts
    ]
    return {
        "inputs": [
            {"name": name, "shape": list(shape), "samples": own}
            for (name, shape), own in zip(inputs, samples or [None] * len(inputs), strict=True)
        ],
        "class_names": _lists(known.class_names),
        "encoding": known.encoding,
        "tasks": list(known.tasks),
    }


def inputs_from_json(content: Any) -> tuple[list[tuple[str, Shape]], Inputs | None]:
    """Return names and shapes of the inputs, and what is known of their samples, if anything.

    Raises
    ------
    ValueError
        If an entry is missing or has another type, or statistics do not fit a shape.
    """
    check_entries(content, "model", CONTENT)
    shapes: list[tuple[str, Shape]] = []
    parts: list[Input] = []
    for number, entry in enumerate(content["inputs"]):
        check_entries(entry, f"input {number}", INPUT)
        shape = tuple(entry["shape"])
        shapes.append((entry["name"], shape))
        if entry["samples"] is not None:
            parts.append(_input(shape, entry["samples"], f"samples of input {number}"))
    if len(parts) != len(shapes):
        return shapes, None
    encoding, tasks = content.get("encoding"), content.get("tasks", [])  # not in earlier versions
    if not isinstance(encoding, str | None):
        raise ValueError("model: encoding must be null or text")
    if not isinstance(tasks, list) or not all(task in TASKS for task in tasks):
        raise ValueError(f"model: tasks must be a list of {', '.join(filter(None, TASKS))}")
    names = _tuples(content["class_names"])
    return shapes, Inputs(tuple(parts), names, encoding, tuple(tasks))


def _input(shape: Shape, samples: Any, where: str) -> Input:
    check_entries(samples, where, SAMPLES)
    if (samples["mean"] is None) != (samples["std"] is None):
        raise ValueError(f"{where} must have both mean and std, or neither")
    statistics = None
    if samples["mean"] is not None:
        mean, std = (np.array(samples[name], np.float64) for name in ("mean", "std"))
        if mean.shape != shape[-1:] or std.shape != shape[-1:] or not (std > 0).all():
            raise ValueError(
                f"{where}: mean and std must have one number for each of the "
                f"{shape[-1] if shape else 0} channels, and std must be above 0"
            )
        statistics = Statistics(mean, std)
    span = None if samples["range"] is None else tuple(samples["range"])
    return Input(shape, samples["dtype"], statistics, span)


def _lists(names: Any) -> Any:
    return list(map(_lists, names)) if isinstance(names, tuple) else names


def _tuples(names: Any) -> Any:
    return tuple(map(_tuples, names)) if isinstance(names, list) else names


def _is_range(value: Any) -> bool:
    return value is None or (are_numbers(value) and len(value) == 2 and value[0] <= value[1])


def _are_class_names(value: Any) -> bool:
    if value is None or _are_texts(value):
        return True
    return isinstance(value, list) and all(names is None or _are_texts(names) for names in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


NUMBERS = (lambda value: value is None or are_numbers(value), "null or a list of finite numbers")

CONTENT: Expected = {
    "inputs": (lambda value: isinstance(value, list) and len(value) > 0, "a list of objects"),
    "class_names": (_are_class_names, "null, or a list of names for each output"),
}
INPUT: Expected = {
    "name": NAME,
    "shape": SHAPE,
    "samples": (lambda value: value is None or isinstance(value, dict), "null or an object"),
}
SAMPLES: Expected = {
    "dtype": (lambda value: value in RAW, f"one of {', '.join(RAW)}"),
    "mean": NUMBERS,
    "std": NUMBERS,
    "range": (_is_range, "null, or the smallest and the largest value"),
}


FORMAT = 1
"""Format of `model.json`; others raise an error."""


def read_content(data: bytes) -> dict[str, Any]:
    """Parse `model.json` and check the types of its entries.

    Options of layers are checked when the layers are constructed, and inputs by `inputs_from_json`.

    Raises
    ------
    ValueError
        If it is not JSON, or has another format or structure.
    """
    content = parse_object(data, "model.json", FORMAT)
    check_entries(content, "model.json", ENTRIES)
    for number, entry in enumerate(content["layers"]):
        check_entries(entry, f"layer {number}", LAYER)
        if "same_as" in entry and not isinstance(entry["same_as"], str):
            raise ValueError(f"layer {number}: same_as must be a name")
    return content


ENTRIES: Expected = {
    "dtype": (lambda value: value in DTYPES, f"one of {', '.join(DTYPES)}"),
    "fused": (lambda value: isinstance(value, bool), "true or false"),
    "layers": (lambda value: isinstance(value, list), "a list of objects"),
    "outputs": NAMES,
}
LAYER: Expected = {"name": NAME, "inputs": NAMES, "shape": SHAPE}


def save_model(
    model: Model, path: str | Path, state: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write a model to a folder: layers, weights, normalisation and names of classes.

    The same model gives the same bytes. With several ranks, use `Trainer.save`.

    Parameters
    ----------
    model : Model
    path : str or Path
        Usually ends in ".pydtnn"; an existing model is replaced atomically.
    state : mapping of str to ndarray, optional
        Parameters and running statistics; by default those of ``model.state()``, which all ranks of
        a mesh call together.

    Raises
    ------
    OSError
        If it cannot be written; an existing model is not changed.
    ValueError
        If there is something else at the path, or an option of a layer cannot be saved.
    """
    files = {
        WEIGHTS: encode_weights(model.state() if state is None else state),
        MODEL: describe_model(model, model.inputs),
    }
    write_model("save", Path(path), files)


def check_saveable(model: Model) -> None:
    """Raise ValueError if an option of a layer cannot be saved, for a check before training.

    Raises
    ------
    ValueError
        The message contains the layer and the option.
    """
    layers_to_json(model.description)


def load(
    path: str | Path,
    *,
    backend: Backend | str = "cpu",
    dtype: str | None = None,
    custom: Mapping[str, type] | None = None,
) -> Model:
    """Load a model that `Trainer.save` or `save_model` wrote, or the best one of a run.

    No code is imported or executed except that of the library and the classes in `custom`.

    Parameters
    ----------
    path : str or Path
        Folder of the model, or of a run: see `pydtnn.load_run` for its other weights.
    backend : Backend or str
    dtype : str, optional
        See `Model`; by default that of the saved model.
    custom : mapping of str to type, optional
        Classes of layers that are not in the library, by name.

    Returns
    -------
    Model

    Raises
    ------
    OSError
        If there is no such folder, or it cannot be read.
    ValueError
        If it is damaged, has invalid content, or contains a layer that is neither in the library
        nor in `custom`.

    Examples
    --------
    >>> model = load("digits.pydtnn")  # doctest: +SKIP
    >>> model.predict_classes(images)  # doctest: +SKIP
    array([3, 8, 1])
    """
    files = read_model("load", Path(path))
    try:
        arrays = decode_weights(files[WEIGHTS])
    except ValueError as error:
        raise ValueError(f"load: {path}: {error}") from error
    return build_model(
        f"load: {path}", files[MODEL], arrays, backend=backend, dtype=dtype, custom=custom
    )


def build_model(
    who: str,
    data: bytes,
    arrays: Mapping[str, np.ndarray],
    *,
    backend: Backend | str,
    dtype: str | None,
    custom: Mapping[str, type] | None,
) -> Model:
    """Return a model from the content of `MODEL` and its weights.

    Parameters
    ----------
    who : str
        Begins the messages of errors.
    data : bytes
    arrays : mapping of str to ndarray
        Parameters and running statistics.
    backend, dtype, custom
        See `load`.

    Raises
    ------
    ValueError
        If the content is damaged or invalid, or does not fit the weights.
    """
    try:
        content = read_content(data)
        if dtype is None:
            dtype = content["dtype"]
        elif str(dtype) not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
        check_numbers(arrays, np.dtype(dtype))
        inputs, known = inputs_from_json(content)
        names, shapes = [list(column) for column in zip(*inputs, strict=True)]
        parts = names, content["layers"], content["outputs"], custom or {}
        _check_shapes(SavedNetwork(*parts), shapes, str(dtype), arrays)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    model = Model(
        SavedNetwork(*parts), shapes, backend=backend, dtype=str(dtype), fuse=content["fused"]
    )
    model.load(arrays)
    model.inputs = known
    return model


def describe_model(model: Model, inputs: Inputs | None) -> bytes:
    """Return the content of `MODEL`: layers, and what is known of the inputs.

    Raises
    ------
    ValueError
        If an option of a layer cannot be saved.
    """
    description = model.description
    content = {
        "format": FORMAT,
        "pydtnn": __version__,
        "dtype": str(model.dtype),
        "fused": description.fused,
        **inputs_to_json(description.inputs, inputs),
        "layers": layers_to_json(description),
        "outputs": list(description.outputs),
    }
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _check_shapes(
    network: SavedNetwork, shapes: Sequence[Shape], dtype: str, arrays: Mapping[str, np.ndarray]
) -> None:
    """Compare the parameters of a network with weights, before memory is allocated for them.

    Raises
    ------
    ValueError
        If the network cannot be built, or its parameters have other names or shapes.
    """
    graph = Graph(shapes, backend=create_backend("numpy"), dtype=dtype)
    try:
        graph.add(network, *graph.inputs)
    except Exception as error:  # of any type: the options are those of a file
        raise ValueError(f"{MODEL}: {describe(error)}") from error
    own = {p.name: p.shape for node in graph.nodes for p in node.layer.parameters}
    statistics = [s for node in graph.nodes for s in node.layer.statistics]
    own |= {f"{s.name}.{what}": (s.channels,) for s in statistics for what in RUNNING}
    given = {name: array.shape for name, array in arrays.items()}
    wrong = [
        f"{name} has shape {given.get(name, 'none')} instead of {own.get(name, 'none')}"
        for name in {**own, **given}
        if own.get(name) != given.get(name)
    ]
    if wrong:
        raise ValueError(f"{WEIGHTS} does not fit {MODEL}: {shorten(wrong)}")

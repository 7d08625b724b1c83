"""The content of `model.json`, and its validation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.data.inputs import Input, Inputs
from pydtnn.data.statistics import Statistics
from pydtnn.kernels.dtypes import DTYPES

FORMAT = 1
"""Format of `model.json`; others raise an error."""

RAW = ("uint8", "float16", "float32", "float64")
"""Types of samples before normalisation; others are saved as float64."""


def read_content(data: bytes) -> dict[str, Any]:
    """Parse `model.json` and check the types of its entries, except options of layers.

    Raises
    ------
    ValueError
        If it is not JSON, or has another format or structure.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"model.json cannot be parsed ({reason})") from error
    if not isinstance(content, dict):
        raise ValueError("model.json must contain an object")
    version = content.get("format")
    if type(version) is not int or version != FORMAT:
        raise ValueError(f"its format must be {FORMAT} for this version of pydtnn, got {version}")
    _check(content, "model.json", ENTRIES)
    for number, entry in enumerate(content["inputs"]):
        _check(entry, f"input {number}", INPUT)
        if entry["samples"] is not None:
            _check(entry["samples"], f"samples of input {number}", SAMPLES)
    for number, entry in enumerate(content["layers"]):
        _check(entry, f"layer {number}", LAYER)
        if "same_as" in entry and not isinstance(entry["same_as"], str):
            raise ValueError(f"layer {number}: same_as must be a name")
    if not _are_class_names(content["class_names"], len(content["outputs"])):
        raise ValueError("class_names must be null, or a list of names for each output")
    return content


def inputs_to_json(inputs: Inputs) -> list[dict[str, Any]]:
    """Convert what is known of the samples of each input."""
    return [
        {
            "dtype": part.dtype if part.dtype in RAW else "float64",
            "mean": None if part.statistics is None else part.statistics.mean.tolist(),
            "std": None if part.statistics is None else part.statistics.std.tolist(),
            "range": None if part.range is None else list(part.range),
        }
        for part in inputs.parts
    ]


def inputs_from_json(content: dict[str, Any]) -> Inputs | None:
    """Return what is known of the samples; None if nothing is.

    Raises
    ------
    ValueError
        If statistics do not fit the shape of the input.
    """
    known: list[Input] = []
    for entry in content["inputs"]:
        samples = entry["samples"]
        if samples is None:
            return None
        shape, statistics = tuple(entry["shape"]), None
        if (samples["mean"] is None) != (samples["std"] is None):
            raise ValueError(f"{entry['name']}: expected both mean and std, or neither")
        if samples["mean"] is not None:
            mean, std = (np.array(samples[name], np.float64) for name in ("mean", "std"))
            if mean.shape != shape[-1:] or std.shape != shape[-1:] or not (std > 0).all():
                raise ValueError(
                    f"{entry['name']}: mean and std must have {shape[-1:]} numbers, and std must "
                    "be above 0"
                )
            statistics = Statistics(mean, std)
        span = None if samples["range"] is None else tuple(samples["range"])
        known.append(Input(shape, samples["dtype"], statistics, span))
    return Inputs(tuple(known), _tuples(content["class_names"]))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check(entry: Any, where: str, expected: Expected) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    for name, (fits, what) in expected.items():
        if not fits(entry.get(name)):
            raise ValueError(f"{where}: {name} must be {what}")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n > 0 for n in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(
        type(n) in (int, float) and -1e300 < n < 1e300 for n in value
    )


def _is_range(value: Any) -> bool:
    return value is None or (_are_numbers(value) and len(value) == 2 and value[0] <= value[1])


def _are_class_names(value: Any, outputs: int) -> bool:
    if outputs == 1 or value is None:
        return value is None or _are_texts(value)
    several = isinstance(value, list) and len(value) == outputs
    return several and all(names is None or _are_texts(names) for names in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


Expected = dict[str, tuple[Callable[[Any], bool], str]]

NAMES = (lambda value: _are_names(value) and len(value) > 0, "a list of names")
NUMBERS = (lambda value: value is None or _are_numbers(value), "null or a list of finite numbers")
SHAPE = (_is_shape, "a list of whole numbers above 0")

ENTRIES: Expected = {
    "dtype": (lambda value: value in DTYPES, f"one of {', '.join(DTYPES)}"),
    "fused": (lambda value: isinstance(value, bool), "true or false"),
    "inputs": (lambda value: isinstance(value, list) and len(value) > 0, "a list of objects"),
    "layers": (lambda value: isinstance(value, list), "a list of objects"),
    "outputs": NAMES,
}
INPUT: Expected = {
    "name": (_is_name, "a name"),
    "shape": SHAPE,
    "samples": (lambda value: value is None or isinstance(value, dict), "null or an object"),
}
SAMPLES: Expected = {
    "dtype": (lambda value: value in RAW, f"one of {', '.join(RAW)}"),
    "mean": NUMBERS,
    "std": NUMBERS,
    "range": (_is_range, "null, or the smallest and the largest value"),
}
LAYER: Expected = {"name": (_is_name, "a name"), "inputs": NAMES, "shape": SHAPE}

"""The inputs that a model was trained on as JSON values, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.data.inputs import Input, Inputs
from pydtnn.data.statistics import Statistics
from pydtnn.saving.entries import NAME, SHAPE, Expected, are_numbers, check_entries

Shape = tuple[int, ...]

RAW = ("uint8", "float16", "float32", "float64")
"""Types of samples before normalisation; others are saved as float64."""


def inputs_to_json(inputs: Sequence[tuple[str, Shape]], known: Inputs | None) -> dict[str, Any]:
    """Convert names and shapes of the inputs of a model, and what is known of their samples."""
    samples: list[dict[str, Any] | None] = [None] * len(inputs)
    if known is not None:
        samples = [
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
            for (name, shape), own in zip(inputs, samples, strict=True)
        ],
        "class_names": None if known is None else _lists(known.class_names),
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
    return shapes, Inputs(tuple(parts), _tuples(content["class_names"]))


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

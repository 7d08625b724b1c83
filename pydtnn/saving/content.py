"""The content of `model.json`, and the validation of its structure."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.dtypes import DTYPES
from pydtnn.saving.entries import NAME, NAMES, SHAPE, Expected, check_entries
from pydtnn.utils.json_object import parse_object

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

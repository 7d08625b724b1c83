"""Check of an optimizer's saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pydtnn.utils.suggest import some


def check_saved(who: str, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any]) -> None:
    """Check the names and shapes of a saved state.

    Parameters
    ----------
    who : str
        First word of errors.
    shapes : mapping of str to tuple
        Shapes of the arrays by name; "iterations" and "lr_factor" are expected too.
    state : mapping

    Raises
    ------
    ValueError
        If a name is missing or unexpected, or an array has another shape.
    """
    expected = {*shapes, "iterations", "lr_factor"}
    if expected != set(state):
        missing, extra = sorted(expected - set(state)), sorted(set(state) - expected)
        raise ValueError(
            f"{who}: the saved state belongs to another optimizer or model: "
            f"missing {some(missing, 3)}, unexpected {some(extra, 3)}; "
            "use the optimizer and model it was saved with"
        )
    for name, shape in shapes.items():
        if np.shape(state[name]) != shape:
            raise ValueError(
                f"{who}: the saved {name} must have shape {shape}, got {np.shape(state[name])}; "
                "use the model with which it was saved"
            )

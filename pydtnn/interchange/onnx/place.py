"""A layer in a network that is exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.layers.base import Shape


@dataclass(frozen=True, eq=False)
class Place:
    """A layer in a network.

    Attributes
    ----------
    name : str
    layer : Layer
        As constructed, without arrays.
    source : str
        Name of the layer whose parameters it has, usually its own.
    inputs : list of str
    shapes : list of tuple of int
        Of the inputs, without the batch axis and with the channels last.
    shape : tuple of int
        Of the output.
    arrays : dict of str to ndarray
        Parameters and running statistics in ONNX's layout, by PyTorch's names.
    reordered : bool
        Whether the features of the inputs are in another order than in ONNX.
    output : str
        Name of the output, by default that of the layer.
    """

    name: str
    layer: Any
    source: str
    inputs: list[str]
    shapes: list[Shape]
    shape: Shape
    arrays: Mapping[str, np.ndarray]
    reordered: bool
    output: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", self.output or self.name)

    def require(self, fits: bool, expected: str) -> None:
        """Raise ValueError if the layer is used in a way that is not supported."""
        if not fits:
            given = " and ".join(map(str, self.shapes))
            raise ValueError(
                f"{self.name}: {type(self.layer).__name__} must have {expected} to be exported, "
                f"got an input of shape {given}"
            )

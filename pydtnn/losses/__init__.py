"""Losses, and checks of targets."""

from typing import TYPE_CHECKING

from pydtnn.losses.functions import (
    ALIASES,
    LOSSES,
    BinaryCrossEntropy,
    CategoricalCrossEntropy,
    Hinge,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    get_loss,
)
from pydtnn.utils.foreign_names import aliases_of, suggesting_getattr

__all__ = [
    "ALIASES",
    "LOSSES",
    "BinaryCrossEntropy",
    "CategoricalCrossEntropy",
    "Hinge",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "get_loss",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = suggesting_getattr(__name__)
    __all__ += aliases_of(__name__)  # `from package import *` reads no other names

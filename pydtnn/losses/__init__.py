"""Losses, and checks of targets."""

from typing import TYPE_CHECKING

from pydtnn.losses.functions import (
    ALIASES,
    LOSSES,
    BinaryCrossEntropy,
    CategoricalCrossEntropy,
    Hinge,
    KLDivergence,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    get_loss,
)
from pydtnn.utils.names import module_getattr

__all__ = [
    "ALIASES",
    "LOSSES",
    "BinaryCrossEntropy",
    "CategoricalCrossEntropy",
    "Hinge",
    "KLDivergence",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "get_loss",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__)

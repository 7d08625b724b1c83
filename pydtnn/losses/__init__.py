"""Losses, and checks of targets."""

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

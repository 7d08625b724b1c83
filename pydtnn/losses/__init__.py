"""Losses, and what targets may look like beside predictions."""

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

"""RandAugment: operations chosen at random, all with the same strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import blocks
from pydtnn.data.augment.operations import NOTHING, NUMBERS, apply_chosen
from pydtnn.data.augment.pixels import PixelAugmentation
from pydtnn.data.order import below
from pydtnn.utils.validate import number, whole

Array = NDArray[Any]

CHOICES = np.array([NOTHING, *(which for name, which in NUMBERS.items() if name != "invert")])
"""The 14 operations of the paper, of which the first is the identity."""

LARGEST = 30
"""Magnitude of the largest strength."""


@dataclass(frozen=True)
class RandAugment(PixelAugmentation):
    """Apply operations that are chosen uniformly, with replacement, and have equal magnitudes.

    The operations are the identity, autocontrast, equalize, rotate, solarize, saturation,
    posterize, contrast, brightness, sharpness, and shears and translations along both axes, with
    torchvision's ranges. Pixels outside of an image have the mean colour.

    Parameters
    ----------
    operations : int
        Operations per image, N in the paper.
    magnitude : float
        Strength of all of them, M in the paper, from 0 to 30.

    References
    ----------
    Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search space",
    NeurIPS 2020.
    """

    operations: int = 2
    magnitude: float = 9.0

    def __post_init__(self) -> None:
        whole("RandAugment", "operations", self.operations, at_least=1, at_most=100)
        number("RandAugment", "magnitude", self.magnitude, at_least=0, at_most=LARGEST)

    @property
    def words(self) -> int:
        return blocks(2 * self.operations)

    def change(self, x: Array, words: Array, fill: Array) -> Array:
        strength = np.full(len(x), self.magnitude / LARGEST)
        for step in range(self.operations):
            chosen = CHOICES[below(words[:, 2 * step], len(CHOICES))]
            x = apply_chosen(x, chosen, strength, words[:, 2 * step + 1] >= 2**31, fill)
        return x

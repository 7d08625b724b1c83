"""RandAugment: operations chosen at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import blocks
from pydtnn.data.augment.operations import NO_OPERATION, OPERATIONS, PixelAugmentation, apply_chosen
from pydtnn.data.order import below
from pydtnn.utils.validate import check_float, check_int

Array = NDArray[Any]

CHOICES = np.array([NO_OPERATION, *range(len(OPERATIONS))])
"""The 14 operations of the paper, of which the first is the identity."""

MAX_MAGNITUDE = 30
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
        check_int("RandAugment", "operations", self.operations, at_least=1, at_most=100)
        check_float("RandAugment", "magnitude", self.magnitude, at_least=0, at_most=MAX_MAGNITUDE)

    @property
    def words(self) -> int:
        return blocks(2 * self.operations)

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        return self.change(masks, words, fill, masks=True)

    def change(self, x: Array, words: Array, fill: Array, masks: bool = False) -> Array:
        strength = np.full(len(x), self.magnitude / MAX_MAGNITUDE)
        for step in range(self.operations):
            chosen = CHOICES[below(words[:, 2 * step], len(CHOICES))]
            x = apply_chosen(x, chosen, strength, words[:, 2 * step + 1] >= 2**31, fill, masks)
        return x

"""RandAugment and AutoAugment: operations chosen at random, or by a learned policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import between, blocks
from pydtnn.data.augment.operations import NO_OPERATION, NUMBERS, PixelAugmentation, apply_chosen
from pydtnn.data.order import below
from pydtnn.utils.validate import check_float, check_int

CIFAR10 = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("saturation", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("saturation", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("saturation", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("saturation", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("saturation", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)
"""Operation, probability and magnitude (0 to 9) of both steps of 25 sub-policies: table 7."""

MAX_AUTO_MAGNITUDE = 9
"""Magnitude of the largest strength."""


@dataclass(frozen=True)
class AutoAugment(PixelAugmentation):
    """Apply one of the 25 pairs of operations that were found on CIFAR-10, chosen uniformly.

    Each operation is applied with its probability; the ranges are those of torchvision. Pixels
    outside of an image have the mean colour.

    References
    ----------
    Cubuk et al., "AutoAugment: learning augmentation strategies from data", CVPR 2019, table 7 of
    the appendix.
    """

    @property
    def words(self) -> int:
        return blocks(5)

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        return self.change(masks, words, fill, masks=True)

    def change(self, x: Array, words: Array, fill: Array, masks: bool = False) -> Array:
        chosen = below(words[:, 0], len(CIFAR10))
        for step, (draw, sign) in enumerate(((1, 2), (3, 4))):
            table = [pair[step] for pair in CIFAR10]
            number, probability, magnitude = (
                np.array(column)[chosen]
                for column in zip(*((NUMBERS[name], p, m) for name, p, m in table), strict=True)
            )
            applied = between(words[:, draw], 0, 1) < probability
            number = np.where(applied, number, NO_OPERATION)
            x = apply_chosen(
                x, number, magnitude / MAX_AUTO_MAGNITUDE, words[:, sign] >= 2**31, fill, masks
            )
        return x


Array = NDArray[Any]

CHOICES = np.array([NO_OPERATION, *(which for name, which in NUMBERS.items() if name != "invert")])
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

"""Random changes of brightness, contrast, saturation and hue."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment import colour
from pydtnn.data.augment.augmentation import between, blocks
from pydtnn.data.augment.operations import PixelAugmentation
from pydtnn.data.order import below
from pydtnn.utils.validate import check_float

Array = NDArray[Any]

ORDERS = np.array([*itertools.permutations(range(4))])


@dataclass(frozen=True)
class ColorJitter(PixelAugmentation):
    """Change brightness, contrast, saturation and hue, in random order.

    The parameters, their ranges and their meaning are those of torchvision's ColorJitter.

    Parameters
    ----------
    brightness, contrast, saturation : float
        Factors are uniform in ``[max(0, 1 - value), 1 + value]``.
    hue : float
        Turns of the hue are uniform in ``[-hue, hue]``, at most 0.5.
    """

    moves: ClassVar[bool] = False

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_float("ColorJitter", name, getattr(self, name), at_least=0)
        check_float("ColorJitter", "hue", self.hue, at_least=0, at_most=0.5)

    @property
    def words(self) -> int:
        return blocks(5)

    def change(self, x: Array, words: Array, fill: Array) -> Array:
        operations = (
            (colour.brightness, self.brightness, 1),
            (colour.contrast, self.contrast, 1),
            (colour.saturation, self.saturation, 1),
            (colour.hue, self.hue, 0),
        )
        order = ORDERS[below(words[:, 4], len(ORDERS))]  # (n, 4)
        for place in range(len(operations)):
            for which, (operation, width, middle) in enumerate(operations):
                rows = np.flatnonzero(order[:, place] == which)
                if len(rows) and width > 0:
                    low = max(0, middle - width) if middle else -width
                    amount = between(words[rows, which], low, middle + width)
                    x[rows] = operation(x[rows], amount)
        return x

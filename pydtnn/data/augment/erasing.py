"""Erasing of random boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import Augmentation, between, blocks
from pydtnn.data.augment.boxes import BOX_WORDS, draw_boxes
from pydtnn.utils.validate import number

Array = NDArray[Any]


@dataclass(frozen=True)
class RandomErasing(Augmentation):
    """Fill a box of random area, shape and position with the mean colour.

    This is the variant RE-M of the paper. Of ten boxes with a side ratio log-uniform in [1 / ratio,
    ratio], the first that fits into the image; an image into which none fits is not changed.

    Parameters
    ----------
    probability : float
        Share of the images that are changed.
    smallest, largest : float
        Limits of the box's area, as shares of the image's, in (0, 1].
    ratio : float
        Largest ratio of the sides, at least 1.

    References
    ----------
    Zhong et al., "Random erasing data augmentation", AAAI 2020.
    """

    probability: float = 0.5
    smallest: float = 0.02
    largest: float = 0.4
    ratio: float = 10 / 3

    def __post_init__(self) -> None:
        who = "RandomErasing"
        number(who, "probability", self.probability, at_least=0, at_most=1)
        number(who, "smallest", self.smallest, above=0, at_most=1)
        number(who, "largest", self.largest, at_least=self.smallest, at_most=1)
        number(who, "ratio", self.ratio, at_least=1)

    @property
    def words(self) -> int:
        return blocks(BOX_WORDS + 1)

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        _, height, width, _ = x.shape
        boxes, found = draw_boxes(words, height, width, self.smallest, self.largest, self.ratio)
        erased = found & (between(words[:, BOX_WORDS], 0, 1) < self.probability)
        x[boxes.mask(height, width) & erased[:, None, None]] = fill
        return x

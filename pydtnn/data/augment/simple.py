"""Crops at random places, mirror images, and boxes that are filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import Augmentation, between, blocks
from pydtnn.data.augment.resized_crop import BOX_WORDS, check_limits, draw_boxes
from pydtnn.data.order import below
from pydtnn.utils.validate import check_float, check_int


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

    moves: ClassVar[bool] = False

    probability: float = 0.5
    smallest: float = 0.02
    largest: float = 0.4
    ratio: float = 10 / 3

    def __post_init__(self) -> None:
        check_float("RandomErasing", "probability", self.probability, at_least=0, at_most=1)
        check_limits("RandomErasing", self.smallest, self.largest, self.ratio)

    @property
    def words(self) -> int:
        return blocks(BOX_WORDS + 1)

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        _, height, width, _ = x.shape
        boxes, found = draw_boxes(words, height, width, self.smallest, self.largest, self.ratio)
        erased = found & (between(words[:, BOX_WORDS], 0, 1) < self.probability)
        x[boxes.mask(height, width) & erased[:, None, None]] = fill
        return x


Array = NDArray[Any]


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Pad every side by `padding` pixels and crop an image of the original size at random.

    The border has the mean colour, which is zero after normalisation, as in He et al., "Deep
    residual learning for image recognition" (2016), section 4.2.
    """

    kernel: ClassVar[str] = "crop:padding"

    padding: int = 4

    def __post_init__(self) -> None:
        check_int("RandomCrop", "padding", self.padding, at_least=1)

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if the border is wider than the image."""
        if self.padding > min(input_shape[:2]):
            raise ValueError(
                f"RandomCrop: padding must be at most {min(input_shape[:2])} pixels for images of "
                f"{input_shape[0]} x {input_shape[1]}, got {self.padding}; use less, such as crop:4"
            )

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        n, height, width, channels = x.shape
        p = self.padding
        padded = np.empty((n, height + 2 * p, width + 2 * p, channels), x.dtype)
        # One row at a time: a broadcast of C elements would have an inner loop of length C.
        padded.reshape(-1, (width + 2 * p) * channels)[:] = np.tile(fill, width + 2 * p)
        padded[:, p : p + height, p : p + width] = x
        # View (n, row, shift, W * C): the W pixels from `shift` on in each padded row, so that a
        # gather copies rows.
        image, row, pixel, item = padded.strides
        windows = as_strided(
            padded,
            (n, height + 2 * p, 2 * p + 1, width * channels),
            (image, row, pixel, item),
            writeable=False,
        )
        top = below(words[:, 0], 2 * p + 1)[:, None] + np.arange(height)  # (n, H)
        left = below(words[:, 1], 2 * p + 1)[:, None]
        return windows[np.arange(n)[:, None], top, left].reshape(x.shape)

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        return self(masks, words, fill)


@dataclass(frozen=True)
class HorizontalFlip(Augmentation):
    """Mirror half of the images, left to right."""

    kernel: ClassVar[str] = "flip"

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        chosen = np.flatnonzero(words[:, 0] >> np.uint32(31))
        x[chosen] = x[chosen, :, ::-1]
        return x

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        return self(masks, words, fill)


@dataclass(frozen=True)
class AlternatingFlip(HorizontalFlip):
    """Mirror half of the images, left to right, and in the next epoch the other half.

    Two consecutive epochs have both forms of every image, whereas independent flips repeat the form
    of half of the images.

    References
    ----------
    Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, section 3.6.
    """

    kernel: ClassVar[str] = "flip"
    alternates: ClassVar[bool] = True


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Fill a square of `size` pixels with the mean colour; its centre may be at the edge.

    DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout"
    (2017).
    """

    kernel: ClassVar[str] = "cutout:size"
    moves: ClassVar[bool] = False

    size: int = 8

    def __post_init__(self) -> None:
        check_int("Cutout", "size", self.size, at_least=1)

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        _, height, width, _ = x.shape
        inside = [
            np.abs(
                2 * (np.arange(extent) - below(words[:, axis], extent)[:, None]) + 1 - self.size % 2
            )
            < self.size
            for axis, extent in enumerate((height, width))
        ]  # (n, H) and (n, W)
        x[inside[0][:, :, None] & inside[1][:, None, :]] = fill
        return x

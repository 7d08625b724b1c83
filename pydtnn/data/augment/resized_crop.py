"""Random parts of images, enlarged to the size of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import Augmentation, between, blocks
from pydtnn.data.order import below
from pydtnn.utils.validate import check_float

MAX_ATTEMPTS = 10
"""Areas and shapes that are drawn for a box; the first that fits into the image is used."""

BOX_WORDS = blocks(2 * MAX_ATTEMPTS + 2)
"""Random words of a box."""


class Boxes(NamedTuple):
    """One box for each of n images, in pixels; all arrays are int64 of shape ``(n,)``."""

    top: Array
    left: Array
    height: Array
    width: Array

    def mask(self, height: int, width: int) -> Array:
        """Return which pixels of images of this size are inside, bool ``(n, height, width)``."""
        row = np.arange(height) - self.top[:, None]
        column = np.arange(width) - self.left[:, None]
        rows = (row >= 0) & (row < self.height[:, None])
        columns = (column >= 0) & (column < self.width[:, None])
        return rows[:, :, None] & columns[:, None, :]


def check_limits(who: str, smallest: float, largest: float, ratio: float) -> None:
    """Raise an error if the limits of boxes, see `draw_boxes`, are not possible."""
    check_float(who, "smallest", smallest, above=0, at_most=1)
    check_float(who, "largest", largest, at_least=smallest, at_most=1)
    check_float(who, "ratio", ratio, at_least=1)


def draw_boxes(
    words: Array, height: int, width: int, smallest: float, largest: float, ratio: float
) -> tuple[Boxes, Array]:
    """Draw boxes whose area is uniform and whose ratio of the sides is log-uniform.

    Parameters
    ----------
    words : ndarray of uint32, shape ``(n, BOX_WORDS)``
    height, width : int
        Size of the images.
    smallest, largest : float
        Limits of the area, as shares of the image's.
    ratio : float
        Width / height is between ``1 / ratio`` and `ratio`.

    Returns
    -------
    boxes : Boxes
    found : ndarray of bool, shape ``(n,)``
        Whether one of the attempts fits into the image; otherwise the box is the whole image.
    """
    area = height * width * between(words[:, :MAX_ATTEMPTS], smallest, largest)  # (n, attempts)
    log = math.log(ratio)
    aspect = np.exp(between(words[:, MAX_ATTEMPTS : 2 * MAX_ATTEMPTS], -log, log))
    heights = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    widths = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    found, chosen = fits.any(axis=1), (np.arange(len(words)), fits.argmax(axis=1))
    h = np.where(found, heights[chosen], height)
    w = np.where(found, widths[chosen], width)
    top = below(words[:, 2 * MAX_ATTEMPTS], height - h + 1)
    left = below(words[:, 2 * MAX_ATTEMPTS + 1], width - w + 1)
    return Boxes(top, left, h, w), found


Array = NDArray[Any]


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """Crop a box of random area and shape, and resize it to the original size.

    Of ten boxes with a side ratio log-uniform in [1 / ratio, ratio], the first that fits into the
    image; otherwise the whole image.

    Parameters
    ----------
    smallest, largest : float
        Limits of the box's area, as shares of the image's, in (0, 1].
    ratio : float
        Largest ratio of the sides, at least 1.

    References
    ----------
    Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6.
    """

    smallest: float = 0.08
    largest: float = 1.0
    ratio: float = 4 / 3

    def __post_init__(self) -> None:
        check_limits("RandomResizedCrop", self.smallest, self.largest, self.ratio)

    @property
    def words(self) -> int:
        return BOX_WORDS

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        return enlarge(x, self._boxes(x, words))

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        """Return the nearest pixels: those whose area has the centre of a pixel of the result."""
        n, height, width, _ = masks.shape
        boxes = self._boxes(masks, words)
        row = _nearest(boxes.top, boxes.height, height)
        column = _nearest(boxes.left, boxes.width, width)
        return masks[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]

    def _boxes(self, x: Array, words: Array) -> Boxes:
        _, height, width, _ = x.shape
        return draw_boxes(words, height, width, self.smallest, self.largest, self.ratio)[0]


def enlarge(x: Array, boxes: Boxes) -> Array:
    """Resize the part in each image's box to the size of the image, by bilinear interpolation.

    Coordinates are those of pixel centres, and pixels outside of the box are not read. A box is
    never larger than the image, so that no filter against aliasing is needed.

    Parameters
    ----------
    x : ndarray, shape ``(n, H, W, C)``, uint8 or float
    boxes : Boxes

    Returns
    -------
    ndarray, of the shape and dtype of `x`
        uint8 results are rounded once.
    """
    n, height, width, channels = x.shape
    dtype = np.promote_types(x.dtype, np.float32)
    image = np.arange(n)[:, None]
    row, next_row, down = _taps(boxes.top, boxes.height, height)
    upper = x[image, row].astype(dtype)  # (n, H, W, C)
    y = upper + (x[image, next_row] - upper) * down.astype(dtype)[:, :, None, None]
    column, next_column, right = _taps(boxes.left, boxes.width, width)
    # Positions of the first pixels of rows among all pixels, (n, H, 1)
    begin = (image * height + np.arange(height))[:, :, None] * width
    pixels = y.reshape(-1, channels)
    left = pixels.take(begin + column[:, None, :], axis=0)
    y = pixels.take(begin + next_column[:, None, :], axis=0)
    y -= left
    y *= right.astype(dtype)[:, None, :, None]
    y += left
    return (np.rint(y) if x.dtype == np.uint8 else y).astype(x.dtype, copy=False)


def _nearest(start: Array, size: Array, out: int) -> Array:
    """Return for each of `out` items the nearest one in ranges, shape ``(n, out)``; see `_taps`."""
    return start[:, None] + (2 * np.arange(out) + 1) * size[:, None] // (2 * out)


def _taps(start: Array, size: Array, out: int) -> tuple[Array, Array, Array]:
    """Return the two items that are interpolated for each of `out` ones, and the second's weight.

    `start` and `size`, ``(n,)``, are ranges of items; the results have shape ``(n, out)``.
    """
    last = size[:, None] - 1
    position = (np.arange(out) + 0.5) * (size[:, None] / out) - 0.5
    position = np.clip(position, 0, last)
    first = position.astype(np.int64)
    begin = start[:, None]
    return begin + first, begin + np.minimum(first + 1, last), position - first

"""Boxes inside images: of random area, shape and position, or given."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import between, blocks
from pydtnn.data.order import below

Array = NDArray[Any]

ATTEMPTS = 10
"""Areas and shapes that are drawn for a box; the first that fits into the image is used."""

BOX_WORDS = blocks(2 * ATTEMPTS + 2)
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
    area = height * width * between(words[:, :ATTEMPTS], smallest, largest)  # (n, attempts)
    log = math.log(ratio)
    aspect = np.exp(between(words[:, ATTEMPTS : 2 * ATTEMPTS], -log, log))
    heights = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    widths = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    found, chosen = fits.any(axis=1), (np.arange(len(words)), fits.argmax(axis=1))
    h = np.where(found, heights[chosen], height)
    w = np.where(found, widths[chosen], width)
    top = below(words[:, 2 * ATTEMPTS], height - h + 1)
    left = below(words[:, 2 * ATTEMPTS + 1], width - w + 1)
    return Boxes(top, left, h, w), found

"""Crops at random places, mirror images, and squares that are filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import Augmentation
from pydtnn.data.order import below

Array = NDArray[Any]


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Pad every side by `padding` pixels and crop an image of the original size at random.

    The border has the mean colour, which is zero after normalisation, as in He et al., "Deep
    residual learning for image recognition" (2016), section 4.2.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise ValueError(f"RandomCrop: padding must be at least 1 pixel, got {self.padding}")

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


@dataclass(frozen=True)
class HorizontalFlip(Augmentation):
    """Mirror half of the images, left to right."""

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        chosen = np.flatnonzero(words[:, 0] >> np.uint32(31))
        x[chosen] = x[chosen, :, ::-1]
        return x


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Fill a square of `size` pixels with the mean colour; its centre may be at the edge.

    DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout"
    (2017).
    """

    size: int = 8

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Cutout: size must be at least 1 pixel, got {self.size}")

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

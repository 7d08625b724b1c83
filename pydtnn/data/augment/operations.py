"""The operations from which policies choose, and their strengths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment import colour
from pydtnn.data.augment.augmentation import Augmentation


class PixelAugmentation(Augmentation):
    """A random change of 8-bit pixels; a subclass is a frozen dataclass and implements `change`.

    Images of floats in [0, 1] are rounded to 8 bits and divided by 255 afterwards.
    """

    pixels: ClassVar[bool] = True

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if images are neither grey nor of red, green and blue."""
        if input_shape[-1] not in (1, 3):
            raise ValueError(
                f"{type(self).__name__}: images must have 1 or 3 channels, grey or red, green and "
                f"blue, got {input_shape[-1]}; use crop, flip or cutout"
            )

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        if x.dtype == np.uint8:
            return self.change(x, words, fill)
        changed = self.change(_to_bytes(x), words, _to_bytes(fill))
        return (changed / 255).astype(x.dtype)

    @abstractmethod
    def change(self, x: Array, words: Array, fill: Array) -> Array:
        """Return the changed images of uint8: see `Augmentation.__call__`."""


def _to_bytes(x: Array) -> Array:
    return np.rint(255 * np.clip(x, 0, 1)).astype(np.uint8)


Array = NDArray[Any]


def shear_x(x: Array, amount: Array, fill: Array) -> Array:
    """Shift each row left by `amount` times its distance from the upper edge."""
    return _transform(x, ((1, 0, 0), (amount, 1, 0)), fill)


def shear_y(x: Array, amount: Array, fill: Array) -> Array:
    """Shift each column up by `amount` times its distance from the left edge."""
    return _transform(x, ((1, amount, 0), (0, 1, 0)), fill)


def translate_x(x: Array, share: Array, fill: Array) -> Array:
    """Shift images left by whole pixels: a share of their width."""
    return _transform(x, ((1, 0, 0), (0, 1, np.trunc(share * x.shape[2]))), fill)


def translate_y(x: Array, share: Array, fill: Array) -> Array:
    """Shift images up by whole pixels: a share of their height."""
    return _transform(x, ((1, 0, np.trunc(share * x.shape[1])), (0, 1, 0)), fill)


def rotate(x: Array, degrees: Array, fill: Array) -> Array:
    """Rotate images counterclockwise around their centre."""
    row, column = x.shape[1] / 2, x.shape[2] / 2
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    shift_row = row - cos * row - sin * column
    shift_column = column + sin * row - cos * column
    return _transform(x, ((cos, sin, shift_row), (-sin, cos, shift_column)), fill)


def _transform(x: Array, coefficients: Any, fill: Array) -> Array:
    """Return images whose pixel at p is that of `x` at ``A (p, 1)``, as Pillow's `Image.transform`.

    p are row and column of a pixel's centre; `coefficients` are the 2 x 3 entries of A, each one
    number or one for each image.
    """
    n, height, width, channels = x.shape
    of_row, of_column = np.arange(height)[:, None] + 0.5, np.arange(width) + 0.5
    row, column = (
        np.floor(a * of_row + b * of_column + c).astype(np.int64)  # (n, H, W)
        for a, b, c in (
            [np.broadcast_to(entry, n)[:, None, None] for entry in line] for line in coefficients
        )
    )
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    image = np.arange(n)[:, None, None]
    place = np.where(inside, (image * height + row) * width + column, 0)
    y = x.reshape(-1, channels).take(place, axis=0)
    y[~inside] = fill
    return y


MAX_TRANSLATION = 150 / 331
"""Largest translation, as a share of the image: 150 of 331 pixels in the search on ImageNet."""


class Operation(NamedTuple):
    """An operation of a policy.

    Attributes
    ----------
    apply : function
        Takes uint8 images ``(n, H, W, C)``, float64 amounts ``(n,)`` and the colour ``(C,)`` of
        pixels outside; returns the changed images.
    most : float
        Amount at strength 1; it is proportional to the strength.
    signed : bool
        Whether the amount is negative for half of the images.
    moves : bool
        Whether pixels move, and keep their colour.
    """

    apply: Callable[[Array, Array, Array], Array]
    most: float = 0.0
    signed: bool = False
    moves: bool = False


OPERATIONS: dict[str, Operation] = {
    "shear_x": Operation(shear_x, 0.3, True, True),
    "shear_y": Operation(shear_y, 0.3, True, True),
    "translate_x": Operation(translate_x, MAX_TRANSLATION, True, True),
    "translate_y": Operation(translate_y, MAX_TRANSLATION, True, True),
    "rotate": Operation(rotate, 30, True, True),
    "brightness": Operation(lambda x, change, _: colour.brightness(x, 1 + change), 0.9, True),
    "saturation": Operation(lambda x, change, _: colour.saturation(x, 1 + change), 0.9, True),
    "contrast": Operation(lambda x, change, _: colour.contrast(x, 1 + change), 0.9, True),
    "sharpness": Operation(lambda x, change, _: colour.sharpness(x, 1 + change), 0.9, True),
    "posterize": Operation(lambda x, bits, _: colour.posterize(x, np.rint(bits)), 4),
    "solarize": Operation(lambda x, below, _: colour.solarize(x, 256 - below), 256),
    "autocontrast": Operation(lambda x, *_: colour.autocontrast(x)),
    "equalize": Operation(lambda x, *_: colour.equalize(x)),
}
"""Operations by name, with the ranges of torchvision. Of strength 0, all but the last two are the
identity; to this end, the threshold of solarize begins at 256, as in the paper, not at 255."""

NO_OPERATION = -1
"""Number of no operation."""


def apply_chosen(
    x: Array, chosen: Array, strength: Array, negative: Array, fill: Array, masks: bool = False
) -> Array:
    """Apply one operation to each image, in place.

    Parameters
    ----------
    x : ndarray of uint8, shape ``(n, H, W, C)``
    chosen : ndarray of int, shape ``(n,)``
        Number of each image's operation, or `NO_OPERATION`.
    strength : ndarray, shape ``(n,)``
        In [0, 1].
    negative : ndarray of bool, shape ``(n,)``
        Whether a signed amount is negative.
    fill : ndarray of uint8, shape ``(C,)``
        Colour of pixels outside of an image.
    masks : bool, default False
        Whether `x` are masks of any dtype, to which only operations that move pixels apply.
    """
    for which, operation in enumerate(OPERATIONS.values()):
        rows = np.flatnonzero(chosen == which)
        if not len(rows) or (masks and not operation.moves):
            continue
        amount = operation.most * strength[rows]
        if operation.signed:
            amount = np.where(negative[rows], -amount, amount)
        x[rows] = operation.apply(x[rows], amount, fill)
    return x

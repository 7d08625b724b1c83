"""Affine maps of images, with the nearest pixel and one colour outside of the image.

The operations take images ``(n, H, W, C)``, one amount for each image, ``(n,)``, and the colour
``(C,)``, and agree with Pillow's ``Image.transform`` and ``Image.rotate``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def shear_x(x: Array, amount: Array, fill: Array) -> Array:
    """Shift each row left by `amount` times its distance from the upper edge."""
    return _transform(x, ((1, 0, 0), (amount, 1, 0)), fill)


def shear_y(x: Array, amount: Array, fill: Array) -> Array:
    """Shift each column up by `amount` times its distance from the left edge."""
    return _transform(x, ((1, amount, 0), (0, 1, 0)), fill)


def translate_x(x: Array, amount: Array, fill: Array) -> Array:
    """Shift images left by a number of pixels."""
    return _transform(x, ((1, 0, 0), (0, 1, amount)), fill)


def translate_y(x: Array, amount: Array, fill: Array) -> Array:
    """Shift images up by a number of pixels."""
    return _transform(x, ((1, 0, amount), (0, 1, 0)), fill)


def rotate(x: Array, degrees: Array, fill: Array) -> Array:
    """Rotate images counterclockwise around their centre."""
    row, column = x.shape[1] / 2, x.shape[2] / 2
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    shift_row = row - cos * row - sin * column
    shift_column = column + sin * row - cos * column
    return _transform(x, ((cos, sin, shift_row), (-sin, cos, shift_column)), fill)


def _transform(x: Array, coefficients: Any, fill: Array) -> Array:
    """Return images whose pixel at p is that of `x` at ``A (p, 1)``.

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

"""Resizing of images, and their conversion to float32: compiled, or by Pillow and NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def resize(image: Array, box: tuple[int, int, int, int], out: Array) -> None:
    """Resize a box of an image as Pillow does: bilinear, with a filter as wide as the reduction.

    Along rows first, with results rounded to uint8, and then along columns, whatever the order of
    the installed version of Pillow is.

    Parameters
    ----------
    image : ndarray of uint8, shape ``(H, W, C)``, contiguous
        C is 1 or 3. Filters read outside of the box, too, where the image goes on.
    box : (int, int, int, int)
        Left, upper, right and lower edge, in pixels.
    out : ndarray of uint8, shape ``(h, w, C)``, contiguous
        Receives the result.
    """
    pillow = import_module("PIL.Image")
    (left, top, right, bottom), (rows, columns) = box, out.shape[:2]
    whole, bilinear = pillow.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image), 2
    across = whole.resize((columns, whole.height), bilinear, box=(left, 0, right, whole.height))
    result = across.resize((columns, rows), bilinear, box=(0, top, columns, bottom))
    out[...] = np.asarray(result).reshape(out.shape)


def look_up(x: Array, table: Array, out: Array) -> None:
    """Compute ``out = table[c, x]`` for pixels `x` of c channels.

    Parameters
    ----------
    x : ndarray of uint8, shape ``(..., C)``, contiguous
    table : ndarray of float32, shape ``(C, 256)``
    out : ndarray of float32, of the shape of `x`, contiguous
    """
    for channel, values in enumerate(table):
        out[..., channel] = values[x[..., channel]]


try:
    import pydtnn.utils._pixels as _compiled
except ImportError:  # not compiled: the functions above
    pass
else:
    resize, look_up = _compiled.resize, _compiled.look_up

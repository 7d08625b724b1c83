"""Operations on the colours of 8-bit images, as Pillow's ImageEnhance and ImageOps define them.

Images are uint8 arrays ``(n, H, W, C)`` with C = 1 (grey) or 3 (red, green, blue); amounts are
float64 ``(n,)``, one for each image. Each operation returns an array and does not change its input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def brightness(x: Array, factor: Array) -> Array:
    """Multiply pixels: 0 is black, 1 the image itself."""
    return _blend(np.zeros((1, 1, 1, 1), np.uint8), x, factor)


def contrast(x: Array, factor: Array) -> Array:
    """Extend the distances from the mean grey: 0 is grey, 1 the image itself."""
    values = _flat(_grey(x)[..., None])[..., 0]
    count = values.shape[1]
    mean = (2 * values.sum(axis=1, dtype=np.int64) + count) // (2 * count)  # rounded
    return _blend(mean.astype(np.uint8)[:, None, None, None], x, factor)


def saturation(x: Array, factor: Array) -> Array:
    """Extend the distances from the grey image: 0 is grey, 1 the image itself."""
    return x if x.shape[-1] == 1 else _blend(_grey(x)[..., None], x, factor)


def sharpness(x: Array, factor: Array) -> Array:
    """Extend the distances from a smoothed image: 0 is smoothed, 1 the image itself.

    The filter has the weight 5 at the pixel and 1 at its neighbours; the border is not smoothed.
    """
    wide = x.astype(np.uint16)
    rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    smooth = x.copy()
    smooth[:, 1:-1, 1:-1] = (total + 6) // 13  # rounded
    return _blend(smooth, x, factor)


def hue(x: Array, turns: Array) -> Array:
    """Turn the hue by `turns`, in [-0.5, 0.5], around the circle of colours.

    Value and chroma (maximum and range of the channels) are kept: Smith, "Color gamut transform
    pairs", SIGGRAPH 1978.
    """
    if x.shape[-1] == 1:
        return x
    red, green, blue = (x[..., channel].astype(np.float32) for channel in range(3))
    value = np.maximum(np.maximum(red, green), blue)
    chroma = value - np.minimum(np.minimum(red, green), blue)
    range_ = np.maximum(chroma, 1)  # 0 only for grey, whose hue has no effect
    sixths = np.where(
        value == red,
        (green - blue) / range_,
        np.where(value == green, 2 + (blue - red) / range_, 4 + (red - green) / range_),
    )
    sixths += (6 * turns).astype(np.float32)[:, None, None]
    y = np.empty_like(x)
    for channel, offset in enumerate((5, 3, 1)):
        k = sixths + np.float32(offset)
        k -= 6 * np.floor(k / 6)
        y[..., channel] = np.rint(value - chroma * np.clip(np.minimum(k, 4 - k), 0, 1))
    return y


def posterize(x: Array, bits: Array) -> Array:
    """Set the lowest `bits` bits of pixels to 0."""
    mask = 256 - (1 << bits.astype(np.int64))
    return x & mask.astype(np.uint8)[:, None, None, None]


def solarize(x: Array, threshold: Array) -> Array:
    """Invert pixels of at least `threshold`."""
    return np.where(x < threshold[:, None, None, None], x, 255 - x)


def autocontrast(x: Array) -> Array:
    """Map the minimum of each channel to 0 and its maximum to 255, linearly between them.

    A constant channel is not changed.
    """
    values = _flat(x)
    low = values.min(axis=1).astype(np.float64)[..., None]  # (n, C, 1)
    span = values.max(axis=1)[..., None] - low
    scale = 255 / np.where(span > 0, span, 255)
    stretched = np.clip(np.arange(256) * scale - low * scale, 0, 255)
    return _look_up(np.where(span > 0, stretched, np.arange(256)), x)


def equalize(x: Array) -> Array:
    """Map the values of each channel so that they are about equally frequent."""
    n, height, width, channels = x.shape
    counts = np.bincount(_places(x).reshape(-1), minlength=256 * n * channels)
    counts = counts.reshape(n, channels, 256)
    largest = _flat(x).max(axis=1)[..., None].astype(np.int64)
    step = (height * width - np.take_along_axis(counts, largest, axis=2)) // 255  # (n, C, 1)
    smaller = np.cumsum(counts, axis=2) - counts
    table = np.minimum((step // 2 + smaller) // np.maximum(step, 1), 255)
    return _look_up(np.where(step > 0, table, np.arange(256)), x)


def _blend(degenerate: Array, x: Array, factor: Array) -> Array:
    """Return ``d + factor (x - d)``, clipped and truncated as in Pillow's ``Image.blend``."""
    d = degenerate.astype(np.float32)
    y = x - d
    y *= factor.astype(np.float32)[:, None, None, None]
    y += d
    return np.clip(y, 0, 255, out=y).astype(np.uint8)


def _grey(x: Array) -> Array:
    """Return the luma of images, uint8 ``(n, H, W)``: ITU-R 601-2 in fixed point, as in Pillow."""
    if x.shape[-1] == 1:
        return x[..., 0]
    red, green, blue = (
        x[..., channel] * np.uint32(weight) for channel, weight in enumerate((19595, 38470, 7471))
    )
    return ((red + green + blue + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint8)


def _flat(x: Array) -> Array:
    """Return a view ``(n, H W, C)``; n may be 0, so that -1 would be ambiguous."""
    n, height, width, channels = x.shape
    return x.reshape(n, height * width, channels)


def _places(x: Array) -> Array:
    """Return the place of each pixel's value in tables ``(n, C, 256)``, int64 ``(n, H W, C)``."""
    n, channels = len(x), x.shape[-1]
    begin = 256 * np.arange(n * channels).reshape(n, 1, channels)
    return begin + _flat(x)


def _look_up(tables: Array, x: Array) -> Array:
    """Replace values of pixels by those in tables ``(n, C, 256)``, which are truncated."""
    return tables.astype(np.uint8).reshape(-1).take(_places(x)).reshape(x.shape)

"""Operations on colours equal Pillow's, and colorsys's for the hue."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data.augment import colour
from tests.each import each

pytest.importorskip("PIL", reason="Pillow is not installed: the extra `data`")
from PIL import Image, ImageEnhance, ImageOps

SHAPES = [(1, 1, 3), (2, 2, 1), (7, 5, 1), (7, 5, 3), (32, 31, 3)]


def images(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Random images, images of few values, of one value, and a gradient."""
    height, width, channels = shape
    ramp = np.linspace(0, 255, height * width * channels).reshape(1, *shape)
    parts = [
        rng.integers(0, 256, (3, *shape)),
        rng.integers(100, 104, (2, *shape)),
        np.full((1, *shape), 77),
        255 * rng.integers(0, 2, (1, *shape)),
        ramp,
    ]
    return np.concatenate(parts).astype(np.uint8)


def with_pillow(
    x: NDArray[np.uint8], amounts: NDArray[Any], change: Callable[[Any, float], Any]
) -> NDArray[np.uint8]:
    """Apply a function of Pillow to each image."""
    changed = [
        np.asarray(change(Image.fromarray(one[..., 0] if one.shape[-1] == 1 else one), amount))
        for one, amount in zip(x, amounts.tolist(), strict=True)
    ]
    return np.stack(changed).reshape(x.shape)


ENHANCE: dict[str, tuple[Any, Any]] = {
    "brightness": (colour.brightness, ImageEnhance.Brightness),
    "contrast": (colour.contrast, ImageEnhance.Contrast),
    "saturation": (colour.saturation, ImageEnhance.Color),
    "sharpness": (colour.sharpness, ImageEnhance.Sharpness),
}

EXACT: dict[str, tuple[Any, Any, tuple[float, ...]]] = {
    "posterize": (colour.posterize, lambda im, bits: ImageOps.posterize(im, 8 - bits), (0, 1, 4)),
    "solarize": (colour.solarize, ImageOps.solarize, (0.0, 77.0, 76.5, 256.0)),
    "autocontrast": (
        lambda x, _: colour.autocontrast(x),
        lambda im, _: ImageOps.autocontrast(im),
        (0,),
    ),
    "equalize": (lambda x, _: colour.equalize(x), lambda im, _: ImageOps.equalize(im), (0,)),
}


@each("shape", SHAPES)
@each("name", ENHANCE)
def test_an_enhancement_is_pillow_s(rng, name, shape):
    ours, theirs = ENHANCE[name]
    x = images(rng, shape)
    for factors in (np.linspace(0, 1, len(x)), np.linspace(1, 2.5, len(x))):
        y = ours(x, factors)
        expected = with_pillow(x, factors, lambda im, factor: theirs(im).enhance(factor))
        assert y.dtype == np.uint8
        # One level: where a compiler fuses Pillow's products and sums, it truncates other numbers.
        np.testing.assert_allclose(y.astype(int), expected.astype(int), atol=1)
        assert (y == expected).mean() > 0.99
    before = x.copy()
    np.testing.assert_array_equal(ours(x, np.ones(len(x))), before)  # of no strength
    ours(x, np.full(len(x), 0.3))
    np.testing.assert_array_equal(x, before)


def test_an_image_without_saturation_is_exactly_the_grey_one_of_pillow(rng):
    x = rng.integers(0, 256, (1, 300, 300, 3)).astype(np.uint8)
    grey = np.asarray(Image.fromarray(x[0]).convert("L"))
    np.testing.assert_array_equal(colour.saturation(x, np.zeros(1))[0, ..., 1], grey)


@each("shape", SHAPES)
@each("name", EXACT)
def test_an_operation_of_single_values_is_exactly_pillow_s(rng, name, shape):
    ours, theirs, amounts = EXACT[name]
    x = images(rng, shape)
    for amount in amounts:
        given = np.full(len(x), amount)
        np.testing.assert_array_equal(ours(x, given), with_pillow(x, given, theirs))
        assert ours(x[:0], given[:0]).shape == (0, *shape)


@each("turns", [-0.5, -0.3, 0.0, 0.1, 0.25, 0.5])
def test_the_hue_turns_as_in_colorsys(rng, turns):
    x = images(rng, (6, 5, 3))
    y = colour.hue(x, np.full(len(x), turns))

    def turned(pixel: NDArray[np.float64]) -> list[float]:
        h, s, v = colorsys.rgb_to_hsv(*pixel.tolist())
        return [*colorsys.hsv_to_rgb((h + turns) % 1, s, v)]

    expected = np.array([turned(pixel) for pixel in x.reshape(-1, 3) / 255]).reshape(x.shape)
    # Rounded to the nearest level, in float32.
    np.testing.assert_allclose(y, 255 * expected, atol=0.5 + 1e-3)
    np.testing.assert_array_equal(colour.hue(x, np.zeros(len(x))), x)

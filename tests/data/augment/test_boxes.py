"""Random boxes, crops that are enlarged, and boxes that are erased."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import RandomErasing, RandomResizedCrop
from pydtnn.data.augment.resized_crop import BOX_WORDS, Boxes, draw_boxes, enlarge
from tests.each import each


def words_of(rng: np.random.Generator, n: int, count: int = BOX_WORDS) -> NDArray[np.uint32]:
    return rng.integers(0, 2**32, (n, count), dtype=np.uint32)


def whole(n: int, height: int, width: int) -> Boxes:
    zero = np.zeros(n, np.int64)
    return Boxes(zero, zero, zero + height, zero + width)


def test_areas_are_uniform_ratios_log_uniform_and_places_everywhere(rng):
    n, side, ratio = 20_000, 1000, 4 / 3
    boxes, found = draw_boxes(words_of(rng, n), side, side, 0.2, 0.5, ratio)
    assert found.all()
    area = boxes.height * boxes.width / side**2
    aspect = np.log(boxes.width / boxes.height) / math.log(ratio)
    places = [boxes.top / (side - boxes.height), boxes.left / (side - boxes.width)]
    # Five deviations of a mean of n numbers, and rounding to whole pixels.
    for values, low, high in ((area, 0.2, 0.5), (aspect, -1, 1), *((p, 0, 1) for p in places)):
        spread = (high - low) / math.sqrt(12)
        assert values.min() > low - 0.01
        assert values.max() < high + 0.01
        assert abs(values.mean() - (low + high) / 2) < 5 * spread / math.sqrt(n) + 1e-3
        assert abs(values.std() / spread - 1) < 0.02


def test_boxes_are_inside_of_small_images_too(rng):
    for height, width in ((1, 1), (2, 3), (5, 4), (3, 11)):
        boxes, _ = draw_boxes(words_of(rng, 500), height, width, 0.02, 1.0, 4.0)
        for start, size, extent in (
            (boxes.top, boxes.height, height),
            (boxes.left, boxes.width, width),
        ):
            assert start.min() >= 0
            assert size.min() >= 1
            assert (start + size).max() <= extent
            assert len(np.unique(size)) == extent or extent > 5
        inside = boxes.mask(height, width)
        np.testing.assert_array_equal(inside.sum(axis=(1, 2)), boxes.height * boxes.width)
    boxes, found = draw_boxes(words_of(rng, 50), 1, 64, 0.5, 1.0, 4 / 3)  # into which none fits
    assert not found.any()
    np.testing.assert_array_equal(boxes, whole(50, 1, 64))


@each("shape", [(1, 1, 3), (5, 4, 3), (17, 9, 1)])
def test_an_enlarged_box_is_pillow_s(rng, shape):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: the extra `data`")
    height, width, channels = shape
    x = rng.integers(0, 256, (30, *shape)).astype(np.uint8)
    boxes, _ = draw_boxes(words_of(rng, 30), height, width, 0.05, 1.0, 2.0)
    y, exact = enlarge(x, boxes), enlarge(x.astype(np.float64), boxes)
    np.testing.assert_allclose(y, exact, atol=0.5 + 1e-4)  # rounded, from float32
    for i, (top, left, h, w) in enumerate(zip(*boxes, strict=True)):
        part = image.fromarray(x[i, ..., 0] if channels == 1 else x[i])
        part = part.crop((left, top, left + w, top + h))
        expected = np.asarray(part.resize((width, height), image.Resampling.BILINEAR))
        # One level: Pillow rounds after each axis.
        np.testing.assert_allclose(y[i], expected.reshape(shape).astype(int), atol=1)


def test_the_whole_image_is_not_changed(rng):
    x = rng.normal(size=(4, 6, 5, 2))
    np.testing.assert_array_equal(enlarge(x, whole(4, 6, 5)), x)
    words = words_of(rng, 4)
    np.testing.assert_array_equal(
        RandomResizedCrop(1.0, 1.0, 1.0)(x[:, :5], words, x[0, 0, 0]), x[:, :5]
    )


def test_erased_boxes_have_the_mean_colour_and_the_rest_is_kept(rng):
    erasing = RandomErasing(0.3, 0.1, 0.4, 2.0)
    x = rng.integers(0, 200, (2000, 20, 20, 3)).astype(np.uint8)
    fill = np.array([201, 202, 203], np.uint8)
    y = erasing(x.copy(), words_of(rng, 2000, erasing.words), fill)
    erased = (y == fill).all(axis=-1)
    np.testing.assert_array_equal(y[~erased], x[~erased])
    area = erased.mean(axis=(1, 2))
    assert abs((area > 0).mean() - 0.3) < 0.05  # deviation 0.01
    assert 0.08 < area[area > 0].min() < area.max() < 0.45  # whole pixels
    assert abs(area[area > 0].mean() - 0.25) < 0.02  # deviation 0.004
    rows = erased.any(axis=2).sum(axis=1) * erased.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(rows, erased.sum(axis=(1, 2)))  # rectangles
    for probability in (0, 1):
        y = RandomErasing(probability)(x.copy(), words_of(rng, 2000, erasing.words), fill)
        assert ((y == fill).any(axis=(1, 2, 3)) == probability).all()

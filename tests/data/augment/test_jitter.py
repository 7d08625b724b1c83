from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pydtnn.data import ColorJitter
from pydtnn.data.augment import colour
from pydtnn.data.order import below

FILL = np.zeros(3, np.uint8)


def drawn(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    x = rng.integers(0, 256, (n, 6, 5, 3)).astype(np.uint8)
    return x, rng.integers(0, 2**32, (n, 8), dtype=np.uint32)


def test_each_image_is_changed_by_its_own_factors_in_its_own_order(rng):
    x, words = drawn(rng, 60)
    y = ColorJitter(0.3, 1.5, 0.2, 0.4)(x.copy(), words, FILL)
    u = words / 2**32
    ranges = ((0.7, 1.3), (0.0, 2.5), (0.8, 1.2), (-0.4, 0.4))
    operations = (colour.brightness, colour.contrast, colour.saturation, colour.hue)
    orders = [*itertools.permutations(range(4))]
    for i in range(60):
        expected = x[i : i + 1]
        for which in orders[below(words[i, 4], 24)]:
            low, high = ranges[which]
            expected = operations[which](expected, low + (high - low) * u[i : i + 1, which])
        np.testing.assert_array_equal(y[i], expected[0])


def test_all_orders_and_the_whole_range_of_factors_occur(rng):
    _, words = drawn(rng, 2000)
    counts = np.bincount(below(words[:, 4], 24), minlength=24)
    assert counts.min() > 40  # 83 on average, deviation 9
    grey = np.full((2000, 1, 1, 3), 100, np.uint8)
    bright = ColorJitter(0.5, 0, 0, 0)(grey, words, FILL)[:, 0, 0, 0]
    assert 50 <= bright.min() < 52
    assert 148 < bright.max() <= 150
    assert abs(bright.mean() - 99.5) < 4  # truncated; deviation of the mean 0.65


def test_floats_are_changed_as_the_bytes_that_they_are(rng):
    x, words = drawn(rng, 20)
    expected = ColorJitter()(x.copy(), words, FILL)
    for dtype in ("float32", "float64"):
        y = ColorJitter()((x / 255).astype(dtype), words, FILL.astype(dtype))
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, (expected / 255).astype(dtype))

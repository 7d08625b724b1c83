"""Gradients are rounded to float16 as NumPy rounds them."""

from __future__ import annotations

import numpy as np

from pydtnn.parallel.compression.floats import CHUNK_ELEMENTS, _as_float16
from tests.each import each

REALS = ["float32", "float64"]


@each("dtype", REALS)
def test_every_number_of_float16_and_what_is_half_way_is_rounded_to_nearest_even(dtype):
    numbers = np.arange(2**16, dtype="uint16").view("float16").astype(dtype)
    numbers = numbers[np.isfinite(numbers)]
    between = (numbers[:-1] + numbers[1:]) / 2
    near = [np.nextafter(between, np.array(end, dtype)) for end in (0, np.inf)]
    tiny = np.finfo(dtype).tiny
    x = np.concatenate([numbers, between, *near, np.array([0, tiny, -tiny, tiny / 8], dtype)])
    x = x[np.abs(x) <= np.finfo("float16").max]
    np.testing.assert_array_equal(_as_float16(x).view("uint16"), x.astype("float16").view("uint16"))


@each("size", [0, 1, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1, 2 * CHUNK_ELEMENTS + 17])
def test_arrays_of_any_length_are_rounded(size, rng):
    x = rng.normal(size=size).astype("float32")
    np.testing.assert_array_equal(_as_float16(x), x.astype("float16"))


@each("dtype", REALS)
def test_what_is_not_finite_stays_that(dtype):
    y = _as_float16(np.array([np.inf, -np.inf, np.nan, -0.0, 1], dtype))
    np.testing.assert_array_equal(y, np.array([np.inf, -np.inf, np.nan, -0.0, 1], "float16"))
    assert np.signbit(y[3])

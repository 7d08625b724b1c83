from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.data import ArrayDataset
from pydtnn.data import statistics as module
from pydtnn.data.statistics import Normalize, Statistics, pixel_sums
from tests.each import each


def measured(x: Any) -> Statistics:
    return pixel_sums(lambda i: (x[i], i), x.shape[1:], range(len(x))).statistics()


@each("shape", [(40, 7, 5, 3), (40, 28, 28, 1), (40, 12), (1, 2, 2, 2)])
def test_mean_and_deviation_are_those_of_float64(rng, shape):
    x = rng.integers(0, 256, shape).astype(np.uint8)
    axes = tuple(range(x.ndim - 1))
    found = measured(x)
    # Ours are exact sums, rounded once; NumPy's are sums of at most 31,360 rounded numbers.
    np.testing.assert_allclose(found.mean, (x / 255).mean(axes), rtol=1e-13)
    spread = (x / 255).std(axes)
    np.testing.assert_allclose(found.std, np.where(spread == 0, 1, spread), rtol=1e-12)


def test_the_sums_do_not_overflow():
    x = np.full((3000, 1, 2, 1), 255, np.uint8)
    x[0] = 0
    found = measured(x)
    np.testing.assert_allclose(found.mean, [2999 / 3000], rtol=1e-15)
    np.testing.assert_allclose(found.std, [np.sqrt(2999) / 3000], rtol=1e-15)
    y = Normalize(measured(x[1:]), x.shape[1:], np.float64)(x[1:])  # which never change
    np.testing.assert_allclose(y, 0, atol=1e-15)


def test_the_statistics_do_not_depend_on_how_the_samples_are_cut(rng, monkeypatch):
    x = rng.integers(0, 256, (50, 4, 4, 2)).astype(np.uint8)
    whole = measured(x)
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    cut = measured(x)
    assert whole.mean.tobytes() == cut.mean.tobytes()
    assert whole.std.tobytes() == cut.std.tobytes()


@each("dtype", [np.float32, np.float64])
@each("shape", [(9, 6, 5, 3), (9, 28, 28, 1), (9, 12), (0, 6, 5, 3)])
def test_normalised_pixels_are_x_minus_mean_over_deviation(rng, shape, dtype):
    x = rng.integers(0, 256, shape).astype(np.uint8)
    mean, std = rng.random(shape[-1]), 0.1 + rng.random(shape[-1])
    y = Normalize(Statistics(mean, std), shape[1:], dtype)(x)
    assert y.dtype == dtype
    assert y.flags.c_contiguous
    # Two roundings of numbers up to 10, so a few units in the last place of 10.
    np.testing.assert_allclose(y, (x / 255 - mean) / std, rtol=0, atol=50 * np.finfo(dtype).eps)


def test_floats_without_statistics_are_only_converted(rng):
    x = rng.normal(size=(3, 4))
    y = Normalize(None, (4,), np.float32)(x)
    np.testing.assert_array_equal(y, x.astype(np.float32))
    assert not np.shares_memory(Normalize(None, (4,), np.float64)(x), x)


def test_a_test_set_is_normalised_with_the_statistics_of_the_training_set(images):
    test = ArrayDataset(255 - images.x[:5], images.y[:5], like=images)
    part = images.subset([1, 2])
    for other in (test, part):
        assert other.mean is images.mean
        assert other.std is images.std


def test_sums_of_parts_add_up_to_those_of_the_whole(rng):
    x = rng.integers(0, 256, (23, 4, 5, 3)).astype(np.uint8)
    parts = [
        pixel_sums(lambda i: (x[i], i), x.shape[1:], part)
        for part in (range(9), range(9, 9), range(9, 10), range(10, 23))
    ]
    found = sum(parts[1:], parts[0])
    assert found == pixel_sums(lambda i: (x[i], i), x.shape[1:], range(23))
    assert found.totals == tuple(x.sum((0, 1, 2), dtype=np.int64).tolist())
    assert found.statistics().mean.tobytes() == measured(x).mean.tobytes()

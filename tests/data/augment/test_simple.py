from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pydtnn.data import Cutout, HorizontalFlip, RandomCrop
from pydtnn.data.order import below
from tests.each import each


def words_of(rng: np.random.Generator, n: int) -> NDArray[np.uint32]:
    return rng.integers(0, 2**32, (n, 4), dtype=np.uint32)


@each("dtype", [np.uint8, np.float32])
@each("padding", [1, 4, 9])
def test_a_crop_is_a_window_of_the_padded_image(rng, dtype, padding):
    x = rng.integers(0, 256, (20, 7, 5, 3)).astype(dtype)
    words, fill = words_of(rng, 20), np.array([1, 2, 3], dtype)
    y = RandomCrop(padding)(x.copy(), words, fill)
    for i in range(20):
        p = padding
        padded = np.empty((7 + 2 * p, 5 + 2 * p, 3), dtype)
        padded[:] = fill
        padded[p : p + 7, p : p + 5] = x[i]
        top, left = below(words[i, :2], 2 * p + 1)
        np.testing.assert_array_equal(y[i], padded[top : top + 7, left : left + 5])


def test_a_flip_mirrors_whole_images_left_to_right(rng):
    x = rng.integers(0, 256, (30, 4, 5, 3)).astype(np.uint8)
    words = words_of(rng, 30)
    y = HorizontalFlip()(x.copy(), words, np.zeros(3, np.uint8))
    for i in range(30):
        expected = x[i, :, ::-1] if words[i, 0] >= 2**31 else x[i]
        np.testing.assert_array_equal(y[i], expected)


@each("size", [1, 2, 3, 4, 20])
def test_cutout_paints_one_square_that_may_stick_out(rng, size):
    x = np.full((200, 9, 8, 2), 50, np.uint8)
    words = words_of(rng, 200)
    y = Cutout(size)(x, words, np.array([7, 9], np.uint8))
    whole = 0
    for i in range(200):
        row, column = below(words[i, 0], 9), below(words[i, 1], 8)
        expected = np.full((9, 8, 2), 50, np.uint8)
        top, left = row - size // 2, column - size // 2
        expected[max(top, 0) : top + size, max(left, 0) : left + size] = [7, 9]
        np.testing.assert_array_equal(y[i], expected)
        whole += (y[i, ..., 0] == 7).sum() == size * size
    assert whole > 0 or size == 20

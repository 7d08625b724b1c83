"""Rotary positions, and heads that share keys and values."""

from __future__ import annotations

import numpy as np

from pydtnn.layers import Rotary, StepContext
from pydtnn.model import Model


def rotated(base: float, *xs: np.ndarray, heads: int) -> np.ndarray:
    """Return the queries, keys and values (3, N, T, H, E) of all heads."""
    model = Model(
        Rotary(heads, base=base), [x.shape[1:] for x in xs], backend="numpy", dtype="float64"
    )
    y, _ = model.forward(xs, StepContext(training=False))
    n, length, _ = y.shape
    return np.moveaxis(y.reshape(n, length, 3, heads, -1), 2, 0)


def test_a_pair_turns_by_the_angle_of_its_position_and_place():
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    queries, keys, values = rotated(50.0, x, x, x, heads=2)
    pairs = x.reshape(2, 5, 2, 2, 2)  # two heads of E = 4, whose pairs are i and i + 2
    points = pairs[..., 0, :] + 1j * pairs[..., 1, :]
    turned = points * np.exp(1j * np.arange(5)[:, None, None] * 50.0 ** -np.array([0, 0.5]))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(queries, expected, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(keys, queries)
    np.testing.assert_array_equal(values, x.reshape(values.shape))


def test_consecutive_heads_share_keys_and_values():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, heads * 2)) for heads in (6, 2, 2))
    _, keys, values = rotated(10.0, q, k, v, heads=6)
    for array in (keys, values):
        for first in (0, 3):
            np.testing.assert_array_equal(array[..., first + 1, :], array[..., first, :])
            np.testing.assert_array_equal(array[..., first + 2, :], array[..., first, :])
    assert (keys[..., 0, :] != keys[..., 3, :]).all()

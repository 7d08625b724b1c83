"""Rotary positions, and heads that share keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Rotary, StepContext
from pydtnn.layers.base import Shape
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each(
    ("heads", "shapes"),
    [
        (1, [(1, 2), (1, 2), (1, 2)]),
        (4, [(5, 16), (5, 8), (5, 8)]),
        (6, [(3, 12), (3, 2), (3, 2)]),
    ],
)
def test_rotary_keeps_the_contract(heads: int, shapes: list[Shape], backend: Backend) -> None:
    check_layer(Rotary(heads), *shapes, backend=backend)


def rotated(base: float, *xs: np.ndarray, heads: int) -> np.ndarray:
    """Return the queries, keys and values (3, N, T, H, E) of all heads."""
    model = Model(
        Rotary(heads, base=base), [x.shape[1:] for x in xs], backend="numpy", dtype="float64"
    )
    y, _ = model.forward(xs, StepContext(training=False))
    n, length, _ = y.shape
    return np.moveaxis(y.reshape(n, length, 3, heads, -1), 2, 0)


def test_products_of_queries_and_keys_depend_on_the_difference_of_their_positions() -> None:
    rng = np.random.default_rng(0)
    q, k = (np.tile(rng.normal(size=6), (1, 9, 1)) for _ in range(2))
    queries, keys, _ = rotated(100.0, q, k, k, heads=1)
    scores = np.einsum("nthe,nshe->ts", queries, keys)
    for offset in range(-8, 9):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)
    assert np.ptp(scores[0]) > 0.1


def test_a_pair_turns_by_the_angle_of_its_position_and_place() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    queries, keys, values = rotated(50.0, x, x, x, heads=2)
    pairs = x.reshape(2, 5, 2, 2, 2)  # two heads of E = 4, whose pairs are i and i + 2
    points = pairs[..., 0, :] + 1j * pairs[..., 1, :]
    turned = points * np.exp(1j * np.arange(5)[:, None, None] * 50.0 ** -np.array([0, 0.5]))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(queries, expected, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(keys, queries)
    np.testing.assert_array_equal(values, x.reshape(values.shape))


def test_consecutive_heads_share_keys_and_values() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, heads * 2)) for heads in (6, 2, 2))
    _, keys, values = rotated(10.0, q, k, v, heads=6)
    for array in (keys, values):
        for first in (0, 3):
            np.testing.assert_array_equal(array[..., first + 1, :], array[..., first, :])
            np.testing.assert_array_equal(array[..., first + 2, :], array[..., first, :])
    assert (keys[..., 0, :] != keys[..., 3, :]).all()


@each(
    ("heads", "shapes", "message"),
    [
        (2, [(3, 4)], r"Rotary: expected queries \(T, H E\), keys .*, got \(3, 4\)"),
        (2, [(3, 6), (3, 3), (3, 3)], r"with H=2 and E even, got \(3, 6\), \(3, 3\)"),
        (
            4,
            [(3, 16), (3, 12), (3, 12)],
            "heads must be a multiple of those of keys .*, got 4 and 3",
        ),
        (2, [(3, 8), (4, 8), (4, 8)], r"with H=2 and E even, got \(3, 8\), \(4, 8\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(heads: int, shapes: list[Shape], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model(Rotary(heads), shapes, backend="numpy")

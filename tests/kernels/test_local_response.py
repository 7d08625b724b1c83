"""Local response normalisation: the reference against loops, the cpu against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient

OPTIONS: dict[str, tuple[int, float, float, float]] = {
    "one channel": (1, 0.5, 0.75, 2.0),
    "AlexNet": (5, 5e-4, 0.75, 2.0),
    "even": (4, 2.0, 0.5, 1.0),
    "wide": (9, 3.0, 1.5, 0.1),
    "negative power": (3, 1.0, -0.5, 1.0),
}
CHANNELS = [1, 2, 3, 5, 8, 16, 17, 33, 64, 100]


def forward(backend: Backend, x: np.ndarray, options: tuple[Any, ...]) -> np.ndarray:
    out = np.full_like(x, np.nan)
    backend.norm.local_response_forward(x, *options, out=out)
    return out


def backward(
    backend: Backend, x: np.ndarray, dy: np.ndarray, options: tuple[Any, ...]
) -> np.ndarray:
    out = np.full_like(x, np.nan)
    backend.norm.local_response_backward(x, dy, *options, out=out)
    return out


@each("name", OPTIONS)
def test_the_reference_equals_loops_over_windows(name, rng):
    size, alpha, beta, k = OPTIONS[name]
    x = rng.normal(size=(3, 7))
    expected = np.empty_like(x)
    for row, c in np.ndindex(x.shape):
        near = [i for i in range(c - size // 2, c - size // 2 + size) if 0 <= i < 7]
        mean = sum(x[row, i] ** 2 for i in near) / size
        expected[row, c] = x[row, c] / (k + alpha * mean) ** beta
    y = forward(REFERENCE, x, OPTIONS[name])
    np.testing.assert_allclose(y, expected, rtol=1e-13)


@each("name", OPTIONS)
def test_the_gradient_of_the_reference_is_that_of_differences(name, rng):
    x, dy = rng.normal(size=(2, 2, 6)), rng.normal(size=(2, 2, 6))
    expected = numeric_gradient(lambda value: forward(REFERENCE, value, OPTIONS[name]), x, dy)
    np.testing.assert_allclose(backward(REFERENCE, x, dy, OPTIONS[name]), expected, atol=1e-7)


@each("dtype", DTYPES)
@each("name", OPTIONS)
def test_it_equals_the_reference_also_in_place(cpu_backend, name, dtype, rng):
    for channels in CHANNELS:
        x, dy = rng.normal(size=(2, int(rng.integers(1, 300)), channels)).astype(dtype)
        exact = [array.astype("float64") for array in (x, dy)]
        options = OPTIONS[name]
        expected = [forward(REFERENCE, exact[0], options), backward(REFERENCE, *exact, options)]
        y = forward(cpu_backend, x, options)
        cpu_backend.norm.local_response_backward(x, dy, *options, out=dy)
        for value, want in zip((y, dy), expected, strict=True):
            # a power of at most 1.5 multiplies the error of the logarithm; values are of 1 to 30
            bound = 40 * eps(dtype) * max(np.abs(want).max(), 1)
            np.testing.assert_allclose(value, want, rtol=0, atol=bound)

"""Local response normalisation: the reference against loops, the cpu against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient, same_for_all_threads

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


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_equals_loops_over_windows(name: str, rng: np.random.Generator) -> None:
    size, alpha, beta, k = OPTIONS[name]
    x = rng.normal(size=(3, 7))
    expected = np.empty_like(x)
    for row, c in np.ndindex(x.shape):
        near = [i for i in range(c - size // 2, c - size // 2 + size) if 0 <= i < 7]
        mean = sum(x[row, i] ** 2 for i in near) / size
        expected[row, c] = x[row, c] / (k + alpha * mean) ** beta
    y = forward(REFERENCE, x, OPTIONS[name])
    np.testing.assert_allclose(y, expected, rtol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_of_the_reference_is_that_of_differences(
    name: str, rng: np.random.Generator
) -> None:
    x, dy = rng.normal(size=(2, 2, 6)), rng.normal(size=(2, 2, 6))
    expected = numeric_gradient(lambda value: forward(REFERENCE, value, OPTIONS[name]), x, dy)
    np.testing.assert_allclose(backward(REFERENCE, x, dy, OPTIONS[name]), expected, atol=1e-7)


@pytest.mark.few(67)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_the_reference(
    cpu_backend: Backend, name: str, channels: int, dtype: str, rng: np.random.Generator
) -> None:
    for shape in ((2, 3, channels), (0, channels), (1, channels), (3001, channels)):
        x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
        exact = [array.astype("float64") for array in (x, dy)]
        y, expected = (
            forward(cpu_backend, x, OPTIONS[name]),
            forward(REFERENCE, exact[0], OPTIONS[name]),
        )
        # a power of at most 1.5 multiplies the error of the logarithm; values are of about 1 to 30
        bound = 40 * eps(dtype) * max(np.abs(expected).max(initial=0), 1)
        np.testing.assert_allclose(y, expected, rtol=0, atol=bound)
        dx = backward(cpu_backend, x, dy, OPTIONS[name])
        expected = backward(REFERENCE, *exact, OPTIONS[name])
        bound = 40 * eps(dtype) * max(np.abs(expected).max(initial=0), 1)
        np.testing.assert_allclose(dx, expected, rtol=0, atol=bound)


def test_dx_may_overwrite_dy_and_inputs_may_be_strided(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    options = OPTIONS["even"]
    x, dy = rng.normal(size=(4, 5, 12)), rng.normal(size=(4, 5, 6))
    expected = backward(REFERENCE, x[..., ::2], dy, options)
    assert forward(cpu_backend, x[..., ::2], options) == pytest.approx(
        forward(REFERENCE, x[..., ::2], options), rel=1e-13
    )
    cpu_backend.norm.local_response_backward(x[..., ::2], dy, *options, out=dy)
    np.testing.assert_allclose(dy, expected, rtol=1e-12, atol=1e-13)


def test_threads_do_not_change_a_byte(cpu_backend: Backend, rng: np.random.Generator) -> None:
    x, dy = (rng.normal(size=(9, 31, 29, 24)).astype("float32") for _ in range(2))

    def run(backend: Backend) -> list[np.ndarray]:
        return [
            forward(backend, x, (5, 2.0, 0.75, 1.0)),
            backward(backend, x, dy, (5, 2.0, 0.75, 1.0)),
        ]

    same_for_all_threads(cpu_backend, run)

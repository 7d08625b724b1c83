"""Updates: the reference against the scalar rules of the papers, the cpu against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from tests.kernels.checks import DTYPES, REFERENCE, eps, same_for_all_threads

SIZES = [0, 1, 3, 16, 17, 100, 1009, 40001]
STEPS = 3
ADAM = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}

# case -> (kernel, number of slots, options of step t)
CASES: dict[str, tuple[str, int, Callable[[int], dict[str, Any]]]] = {
    "sgd": ("sgd", 0, lambda t: {"momentum": 0.0, "nesterov": False}),
    "momentum": ("sgd", 1, lambda t: {"momentum": 0.9, "nesterov": False}),
    "nesterov": ("sgd", 1, lambda t: {"momentum": 0.9, "nesterov": True}),
    "rmsprop": ("rmsprop", 1, lambda t: {"rho": 0.9, "epsilon": 1e-7}),
    "adagrad": ("adagrad", 1, lambda t: {"initial": 0.1, "epsilon": 1e-7}),
    "lion": ("lion", 1, lambda t: {"beta1": 0.9, "beta2": 0.99}),
    "adam": ("adam", 2, lambda t: {"step": t, "decoupled": False, **ADAM}),
    "adamw": ("adam", 2, lambda t: {"step": t, "decoupled": True, **ADAM}),
    "nadam": (
        "nadam",
        2,
        lambda t: {"step": t, "mu": 0.5, "mu_next": 0.6, "mu_product": 0.5**t, **ADAM},
    ),
}


def step(backend: Backend, case: str, t: int, arrays: list[np.ndarray], decay: float) -> None:
    """Make step t of a rule on the arrays w, g and its slots."""
    kernel, slots, options = CASES[case]
    if case == "sgd":
        backend.update.sgd(*arrays[:2], None, lr=0.1, decay=decay, **options(t))
    else:
        getattr(backend.update, kernel)(*arrays[: 2 + slots], lr=0.1, decay=decay, **options(t))


def scalar_step(case: str, t: int, w: float, g: float, s: list[float], decay: float) -> float:
    """The same step of one number, as the papers write it; `s` holds its two slots."""
    lr, e = 0.1, ADAM["epsilon"]
    if case in ("adamw", "lion"):
        w, decay = w - lr * decay * w, 0.0
    g += decay * w
    if case == "sgd":
        return w - lr * g
    if case in ("momentum", "nesterov"):
        s[0] = 0.9 * s[0] + g
        return w - lr * (g + 0.9 * s[0] if case == "nesterov" else s[0])
    if case == "rmsprop":
        s[0] = 0.9 * s[0] + 0.1 * g**2
        return w - lr * g / (math.sqrt(s[0]) + 1e-7)
    if case == "adagrad":
        s[0] += g**2
        return w - lr * g / (math.sqrt(s[0] + 0.1) + 1e-7)
    if case == "lion":
        c, s[0] = 0.9 * s[0] + 0.1 * g, 0.99 * s[0] + 0.01 * g
        return w - lr * (c > 0) + lr * (c < 0)
    s[0] = 0.9 * s[0] + 0.1 * g
    s[1] = 0.99 * s[1] + 0.01 * g**2
    v_hat = s[1] / (1 - 0.99**t)
    if case == "nadam":
        product = 0.5**t
        m_hat = 0.6 * s[0] / (1 - product * 0.6) + 0.5 * g / (1 - product)
    else:
        m_hat = s[0] / (1 - 0.9**t)
    return w - lr * m_hat / (math.sqrt(v_hat) + e)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_reference_update_is_the_rule_of_the_paper(case: str, decay: float) -> None:
    rng = np.random.default_rng(0)
    w, slots = rng.normal(size=5), [np.zeros(5), np.zeros(5)]
    numbers, memory = list(w), [[0.0, 0.0] for _ in range(5)]
    for t in range(1, STEPS + 1):
        g = rng.normal(size=5)
        kept = g.copy()
        step(REFERENCE, case, t, [w, g, *slots], decay)
        np.testing.assert_array_equal(g, kept)
        numbers = [
            scalar_step(case, t, *pair, decay) for pair in zip(numbers, g, memory, strict=True)
        ]
    np.testing.assert_allclose(w, numbers, rtol=1e-12)


@pytest.mark.few(75)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_update_equals_the_reference_over_several_steps(
    cpu_backend: Backend, case: str, n: int, dtype: str
) -> None:
    arrays = []
    for backend in (cpu_backend, REFERENCE):
        rng = np.random.default_rng(0)
        w = rng.normal(size=n).astype(dtype)
        slots = [np.zeros(n, dtype), np.zeros(n, dtype)]
        for t in range(1, STEPS + 1):
            # no gradient is so small that epsilon and rounding decide the step
            g = (rng.normal(size=n) + np.sign(rng.normal(size=n))).astype(dtype)
            step(backend, case, t, [w, g, *slots], 0.1)
        arrays.append([w, *slots])
    for actual, expected in zip(*arrays, strict=True):
        # three steps of a dozen roundings of numbers up to 10
        np.testing.assert_allclose(actual, expected, rtol=20 * eps(dtype), atol=40 * eps(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_squared_norm_and_scale_equal_the_reference(
    cpu_backend: Backend, n: int, dtype: str
) -> None:
    x = np.random.default_rng(0).normal(size=n).astype(dtype)
    assert cpu_backend.update.squared_norm(x) == pytest.approx(
        math.fsum(float(v) ** 2 for v in x), rel=1e-13
    )
    assert REFERENCE.update.squared_norm(x) == pytest.approx(
        math.fsum(float(v) ** 2 for v in x), rel=1e-13
    )
    scaled = x.copy()
    cpu_backend.update.scale(scaled, 0.3)
    REFERENCE.update.scale(x, 0.3)
    np.testing.assert_array_equal(scaled, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1023, 1025, 8193, 40001])
@pytest.mark.parametrize("case", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_a_factor_has_the_bytes_of_gradients_that_are_scaled_first(
    cpu_backend: Backend, case: str, size: int, dtype: str
) -> None:
    kernel, slots, options = CASES[case]
    rng, factor = np.random.default_rng(size), 0.3
    start = [rng.random(size).astype(dtype) for _ in range(4)]
    none = () if slots else (None,)
    for backend in (REFERENCE, cpu_backend):
        rule, results = getattr(backend.update, kernel), []
        for folded in (True, False):
            w, g, *state = (array.copy() for array in start)
            if not folded:
                backend.update.scale(g, factor)
            scale = {"scale": factor} if folded else {}
            rule(w, g, *state[:slots], *none, lr=0.1, decay=0.01, **options(2), **scale)
            results.append([array.tobytes() for array in (w, *state)])
            assert folded == (g.tobytes() == start[1].tobytes())
        assert results[0] == results[1]


def test_squared_norm_does_not_overflow_in_float(cpu_backend: Backend) -> None:
    for value in (1e30, 1e-30):
        x = np.full(1000, value, "float32")
        assert cpu_backend.update.squared_norm(x) == pytest.approx(1000 * value**2, rel=1e-6)


def test_nan_in_the_gradient_reaches_the_parameters(cpu_backend: Backend) -> None:
    for case in CASES:
        g = np.full(37, np.nan, "float32")
        arrays = [np.ones(37, "float32"), g, np.zeros(37, "float32"), np.zeros(37, "float32")]
        step(cpu_backend, case, 1, arrays, 0.0)
        assert np.isnan(arrays[0]).all()
        assert math.isnan(cpu_backend.update.squared_norm(g))


@pytest.mark.parametrize("case", CASES)
def test_arrays_of_other_kinds_give_the_same_values(cpu_backend: Backend, case: str) -> None:
    rng = np.random.default_rng(0)
    start, g = rng.normal(size=(2, 40))
    expected = [start.copy(), g, np.zeros(40), np.zeros(40)]
    step(REFERENCE, case, 1, expected, 0.1)
    spread = [start.copy(), np.repeat(g, 2)[::2], np.zeros(80)[::2], np.zeros(80)[::2]]
    step(cpu_backend, case, 1, spread, 0.1)
    every_other = np.zeros(80)[::2]
    every_other[:] = start
    strided = [every_other, g, np.zeros(40), np.zeros(40)]
    step(cpu_backend, case, 1, strided, 0.1)
    for arrays in (spread, strided):
        for actual, exact in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-13)


def test_threads_do_not_change_a_byte(cpu_backend: Backend) -> None:
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 100003)).astype("float32")

    def run(backend: Backend) -> list[np.ndarray | float]:
        results: list[np.ndarray | float] = [backend.update.squared_norm(g)]
        for case in CASES:
            arrays = [w.copy(), g, np.zeros_like(w), np.zeros_like(w)]
            step(backend, case, 1, arrays, 0.1)
            results += arrays
        return results

    same_for_all_threads(cpu_backend, run)

"""Updates: the reference against the scalar rules of the papers, the cpu against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE

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


@each("decay", [0.0, 0.3])
@each("case", CASES)
def test_reference_update_is_the_rule_of_the_paper(case, decay):
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


@each("dtype", DTYPES)
@each("size", [1, 1023, 40001])
@each("case", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_a_factor_has_the_bytes_of_gradients_that_are_scaled_first(cpu_backend, case, size, dtype):
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


def test_parameters_that_are_not_contiguous_are_updated_like_others(cpu_backend, rng):
    for case in CASES:
        memory = rng.random((4, 2, 37))
        strided, contiguous = [*memory[..., ::2]], [*memory[..., ::2].copy()]
        for arrays in (strided, contiguous):
            step(cpu_backend, case, 1, [array[0] for array in arrays], 0.1)
        np.testing.assert_allclose(strided, contiguous, rtol=1e-12)


def test_nan_in_the_gradient_reaches_the_parameters(cpu_backend):
    for case in CASES:
        g = np.full(37, np.nan, "float32")
        arrays = [np.ones(37, "float32"), g, np.zeros(37, "float32"), np.zeros(37, "float32")]
        step(cpu_backend, case, 1, arrays, 0.0)
        assert np.isnan(arrays[0]).all()
        assert math.isnan(cpu_backend.update.squared_norm(g))


def test_a_total_that_is_not_finite_stops_this_update_and_all_later_ones():
    alive, go = np.ones(1), np.ones(1)
    for total, goes_on in ((1.0, 1), (np.inf, 0), (1.0, 0)):
        REFERENCE.update.watch(np.array([2.0, total]), alive, go)
        assert alive == go == goes_on


def test_a_squared_norm_is_added_up_in_double(cpu_backend):
    x = np.random.default_rng(0).normal(size=40001).astype("float32")
    for values in (x, np.full(1000, 1e30, "float32"), np.full(1000, 1e-30, "float32")):
        exact = math.fsum(float(v) ** 2 for v in values)
        for update in (cpu_backend.update, REFERENCE.update):
            assert update.squared_norm(values) == pytest.approx(exact, rel=1e-13)

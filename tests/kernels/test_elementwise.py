"""Activations, sums and softmax: the reference against calculus, the cpu against exact values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels.reference.elementwise import ACTIVATIONS, FUNCTIONS, ActivationKernel, normal
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient, ulps

ALPHA = 0.3
FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else ALPHA * x,
    "elu": lambda x: x if x > 0 else ALPHA * (math.exp(x) - 1),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "arctan": math.atan,
    "log": lambda x: math.log(x) if x > 0 else math.nan,
    "gelu": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: x / 2 * math.erfc(-x / math.sqrt(2)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "hard_sigmoid": lambda x: min(max(x / 6 + 0.5, 0.0), 1.0),
    "softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    "hard_swish": lambda x: x * min(max(x / 6 + 0.5, 0.0), 1.0),
}
# of functions with an exponential, with the largest error in units of the last place
ULPS = {"elu": 2, "sigmoid": 3, "tanh": 3, "arctan": 3, "log": 2, "silu": 4}
SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 88.6, -87.4, -103.5, 1e4, -1e4, np.inf, -np.inf),
    np.nan,
]


def inputs(name: str, n: int) -> np.ndarray:
    """Values on which the activation is defined and has a derivative."""
    x = np.random.default_rng(0).normal(0, 3, n)
    return abs(x) + 0.1 if name == "log" else x


@each("name", FUNCTIONS)
def test_reference_activation_equals_the_textbook_and_has_its_derivative(name):
    x, dy = inputs(name, 200), np.random.default_rng(1).normal(size=200)
    y, dx = np.empty_like(x), np.empty_like(x)
    REFERENCE.elementwise.forward(name, x, out=y, alpha=ALPHA)
    np.testing.assert_allclose(y, [FORMULAS[name](v) for v in x], rtol=1e-12, atol=1e-14)
    z = y if FUNCTIONS[name].reads == "output" else x
    REFERENCE.elementwise.backward(name, dy, z, out=dx, alpha=ALPHA)
    # the function acts on each element by itself, so one difference gives all derivatives
    above, below = ([FORMULAS[name](v) for v in x + side] for side in (1e-6, -1e-6))
    numeric = dy * (np.array(above) - below) / 2e-6
    np.testing.assert_allclose(dx, numeric, rtol=1e-6, atol=1e-8)


def test_reference_gelu_keeps_its_digits_where_tanh_is_close_to_minus_one():
    def exact(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = np.linspace(-12, -4, 33)
    y, dx = np.empty((2, 33))
    REFERENCE.elementwise.forward("gelu", x, out=y)
    REFERENCE.elementwise.backward("gelu", np.ones(33), x, out=dx)
    # the exponential multiplies the rounding of its argument, at most 143, by that argument
    np.testing.assert_allclose(y, exact(x), rtol=1e-13)
    np.testing.assert_allclose(dx, (exact(x + 1e-6) - exact(x - 1e-6)) / 2e-6, rtol=1e-6)


def test_reference_distribution_is_exact_to_its_last_digits_also_far_below_zero():
    x = np.concatenate([np.linspace(-37, 9, 4001), np.linspace(-1e-3, 1e-3, 33)])
    distribution, peak, root = normal(np, x)
    density = peak * root
    exact = [math.erfc(-v / math.sqrt(2)) / 2 for v in x]
    # x^2 / 2 and the argument of erfc are rounded, which the exponential multiplies by up to 1400
    np.testing.assert_allclose(distribution, exact, rtol=4e-13)
    near = abs(x) < 3
    np.testing.assert_allclose(distribution[near], np.array(exact)[near], rtol=4e-15)
    exact = [math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in x]
    np.testing.assert_allclose(density, exact, rtol=4e-13)


def test_reference_softmax_sums_to_one_and_has_its_derivative():
    x, dy = np.random.default_rng(0).normal(size=(2, 3, 7))

    def forward(value: np.ndarray) -> np.ndarray:
        y = np.empty_like(value)
        REFERENCE.elementwise.softmax_forward(value, out=y)
        return y

    y, dx = forward(x), np.empty_like(x)
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(y[0, 0] / y[0, 1], math.exp(x[0, 0] - x[0, 1]), rtol=1e-13)
    REFERENCE.elementwise.softmax_backward(dy, y, out=dx)
    np.testing.assert_allclose(dx, numeric_gradient(forward, x, dy), atol=1e-9)


@each("dtype", DTYPES)
@each("name", ULPS)
def test_activation_is_exact_to_a_few_units_of_the_last_place(cpu_backend, name, dtype):
    rng = np.random.default_rng(0)
    small = 10.0 ** rng.uniform(-30, 1, 20000) * rng.choice([-1, 1], 20000)
    x = np.concatenate([rng.uniform(-20, 20, 20000), rng.uniform(-80, 80, 20000), small])
    x = (abs(x) if name == "log" else x).astype(dtype)
    y = np.empty_like(x)
    cpu_backend.elementwise.forward(name, x, out=y, alpha=1.0)
    wide = x.astype("longdouble" if dtype == "float64" else "float64")
    exact = FUNCTIONS[name].forward(np, wide, 1.0)
    assert ulps(y, exact) <= ULPS[name]


@each("dtype", DTYPES)
@each("name", ["sigmoid", "silu", "gelu", "gelu_exact"])
@each("reference", [False, True])
def test_results_below_the_normal_numbers_are_rounded_once(cpu_backend, name, dtype, reference):
    limits, kernels = np.finfo(dtype), (REFERENCE if reference else cpu_backend).elementwise
    x = np.linspace(-800 if dtype == "float64" else -120, -9, 30001).astype(dtype)
    dy, y, dx = np.full_like(x, -3), np.empty_like(x), np.empty_like(x)
    wide, exact = x.astype("longdouble"), np.empty((2, x.size), "longdouble")
    kernels.forward(name, x, out=y)
    exact[0] = FUNCTIONS[name].forward(np, wide, 0.0)
    if name == "sigmoid":  # whose backward reads y
        dx, exact[1] = y, exact[0]
    else:
        kernels.backward(name, dy, x, out=dx)
        exact[1] = FUNCTIONS[name].backward(np, dy.astype("longdouble"), wide, 0.0)
    # exp multiplies the rounding of its argument by that; a root of it is multiplied twice
    argument = 4 * abs(np.log(limits.tiny)) if "gelu" in name else 8
    for value, right in zip((y, dx), exact, strict=True):
        few = (abs(right) < limits.tiny) & (abs(right) > limits.smallest_subnormal / 2)
        assert few.sum() > 20
        error = abs(value - right)
        assert (error <= 2 * limits.smallest_subnormal + argument * limits.eps * abs(right)).all()
        np.testing.assert_array_equal(value[abs(right) < limits.smallest_subnormal / 4], 0)


@each("name", ["gelu", "gelu_exact", "silu"])
def test_far_from_zero_an_activation_and_its_derivative_are_their_limits(cpu_backend, name):
    x = np.array([-np.inf, -3e38, -1e20, -200, 200, 1e20, 3e38, np.inf], "float32")
    for kernels in (cpu_backend.elementwise, REFERENCE.elementwise):
        y, dx = np.empty_like(x), np.empty_like(x)
        with np.errstate(over="ignore"):  # a cube, in the argument of the sigmoid
            kernels.forward(name, x, out=y)
            kernels.backward(name, np.full_like(x, 2), x, out=dx)
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        np.testing.assert_array_equal(dx, 2 * (x > 0))


@each("dtype", DTYPES)
@each("name", ["gelu", "gelu_exact"])
def test_an_element_does_not_depend_on_its_neighbours(cpu_backend, name, dtype):
    rng, kernels = np.random.default_rng(0), cpu_backend.elementwise
    x, dy = rng.normal(size=(2, 4096)).astype(dtype)
    x[rng.permutation(4096)[:300]] *= 20  # some vectors have elements far from 0, others none
    order = rng.permutation(4096)
    results = []
    for at in (np.arange(4096), order):
        y, dx = np.empty((2, 4096), dtype)
        kernels.forward(name, x[at], out=y)
        kernels.backward(name, dy[at], x[at], out=dx)
        results.append((y[np.argsort(at)], dx[np.argsort(at)]))
    np.testing.assert_array_equal(*results)


@each("dtype", DTYPES)
@each("name", FUNCTIONS)
def test_activation_of_special_values_is_that_of_the_reference(cpu_backend, name, dtype):
    # twice, so that whole vectors and the rest both see every value
    x = np.array(SPECIAL * 2 + [np.nan, -np.inf, np.inf], dtype)
    y, expected = np.empty_like(x), np.empty_like(x)
    with np.errstate(all="ignore"):
        cpu_backend.elementwise.forward(name, x, out=y, alpha=ALPHA)
        REFERENCE.elementwise.forward(name, x, out=expected, alpha=ALPHA)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-44)


@each("name", FUNCTIONS)
def test_nan_in_the_gradient_comes_through(cpu_backend, name):
    dy, z = np.full(37, np.nan, "float32"), np.full(37, 0.5, "float32")
    dx = np.empty_like(dy)
    cpu_backend.elementwise.backward(name, dy, z, out=dx, alpha=ALPHA)
    assert np.isnan(dx).all()


KINKS = {  # places, and the derivatives there, which are PyTorch's: see tests/parity
    "relu": {0: 0},
    "relu6": {0: 0, 6: 0},
    "leaky_relu": {0: ALPHA},
    "elu": {0: ALPHA},
    "hard_sigmoid": {-3: 0, 3: 0},
    "hard_swish": {-3: 0, 3: 1},
}


@each("dtype", DTYPES)
@each("name", KINKS)
def test_derivatives_at_kinks_are_those_of_pytorch(cpu_backend, name, dtype):
    x = np.array([*KINKS[name]], dtype)
    y, dx, kernels = np.empty_like(x), np.empty_like(x), cpu_backend.elementwise
    kernels.forward(name, x, out=y, alpha=ALPHA)
    z = y if FUNCTIONS[name].reads == "output" else x
    kernels.backward(name, np.ones_like(x), z, out=dx, alpha=ALPHA)
    np.testing.assert_array_equal(dx, np.array([*KINKS[name].values()], dtype))


@each("dtype", ["float32", "float64"])
def test_a_view_with_a_pitch_is_added(cpu_backend, dtype):
    a, b = np.random.default_rng(0).normal(size=(2, 3, 5, 7, 33)).astype(dtype)
    view, other = a[..., :13], b[..., :13].copy()
    cpu_backend.elementwise.add(view, other, out=other)
    np.testing.assert_array_equal(other, a[..., :13] + b[..., :13])


@each("dtype", DTYPES)
def test_softmax_of_special_rows_is_that_of_the_reference(cpu_backend, dtype):
    x = np.zeros((7, 21), dtype)
    x[0] += 1e4
    x[1] -= 1e4
    x[2, 3] = -np.inf
    x[3, 20] = np.nan
    x[4, 2] = np.inf
    x[5] = -np.inf
    x[6, :20] = -1e30
    y, expected = np.empty_like(x), np.empty_like(x)
    with np.errstate(invalid="ignore"):
        cpu_backend.elementwise.softmax_forward(x, out=y)
        REFERENCE.elementwise.softmax_forward(x, out=expected)
    np.testing.assert_allclose(y, expected, rtol=4 * eps(dtype))


def test_an_activation_that_only_the_reference_has_runs(cpu_backend, monkeypatch):
    square = ActivationKernel(
        lambda xp, x, alpha: x * x, lambda xp, dy, x, alpha: 2 * x * dy, "input"
    )
    monkeypatch.setitem(ACTIVATIONS, "square", square)
    x, out = np.arange(5.0), np.empty(5)
    cpu_backend.elementwise.forward("square", x, out=out)
    np.testing.assert_array_equal(out, x * x)


def test_what_does_not_fit_is_refused_or_broadcast_as_by_numpy(cpu_backend):
    x, out = np.random.default_rng(0).normal(size=(6, 7)), np.empty((6, 7))
    cpu_backend.elementwise.add(x, x[0], out=out)
    np.testing.assert_array_equal(out, x + x[0])
    with pytest.raises(ValueError, match="needs 42 elements"):
        cpu_backend.elementwise.forward("relu", x[:3], out=out)

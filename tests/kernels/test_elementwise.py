"""Activations, sums and softmax: the reference against calculus, the cpu against exact values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.elementwise import ACTIVATIONS, FUNCTIONS, Activation, normal
from tests.kernels.checks import (
    DTYPES,
    REFERENCE,
    eps,
    numeric_gradient,
    same_for_all_threads,
    ulps,
)

SIZES = [0, 1, 2, 3, 5, 16, 17, 31, 100, 1009, 40001]
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
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-40,
    -1e-40,
    88.6,
    -87.4,
    -103.5,
    1e4,
    -1e4,
    np.inf,
    -np.inf,
    np.nan,
]
SHAPES = [(0, 3), (1, 1), (7, 1), (5, 10), (3, 16), (4, 17), (2, 1000), (3, 2, 33), (700, 100)]


def inputs(name: str, n: int) -> np.ndarray:
    """Values on which the activation is defined and has a derivative."""
    x = np.random.default_rng(0).normal(0, 3, n)
    return abs(x) + 0.1 if name == "log" else x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_activation_equals_the_textbook_and_has_its_derivative(name: str) -> None:
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


def test_reference_gelu_keeps_its_digits_where_tanh_is_close_to_minus_one() -> None:
    def exact(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = np.linspace(-12, -4, 33)
    y, dx = np.empty((2, 33))
    REFERENCE.elementwise.forward("gelu", x, out=y)
    REFERENCE.elementwise.backward("gelu", np.ones(33), x, out=dx)
    # the exponential multiplies the rounding of its argument, at most 143, by that argument
    np.testing.assert_allclose(y, exact(x), rtol=1e-13)
    np.testing.assert_allclose(dx, (exact(x + 1e-6) - exact(x - 1e-6)) / 2e-6, rtol=1e-6)


def test_reference_distribution_is_exact_to_its_last_digits_also_far_below_zero() -> None:
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


def test_reference_softmax_sums_to_one_and_has_its_derivative() -> None:
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


@pytest.mark.few(143)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_equals_the_reference_also_in_place(
    cpu_backend: Backend, name: str, n: int, dtype: str
) -> None:
    x, dy = inputs(name, n).astype(dtype), np.random.default_rng(1).normal(size=n).astype(dtype)
    kernels, y, dx = cpu_backend.elementwise, np.empty_like(x), np.empty_like(x)
    kernels.forward(name, x, out=y, alpha=ALPHA)
    z = y if FUNCTIONS[name].reads == "output" else x
    kernels.backward(name, dy, z, out=dx, alpha=ALPHA)
    # of the same inputs in double; far from 0, gelu and silu magnify the rounding of x by x^2 and x
    exact_y, exact_dx = np.empty((2, n))
    REFERENCE.elementwise.forward(name, x.astype(float), out=exact_y, alpha=ALPHA)
    REFERENCE.elementwise.backward(
        name, dy.astype(float), z.astype(float), out=exact_dx, alpha=ALPHA
    )
    np.testing.assert_allclose(y, exact_y, rtol=4 * eps(dtype), atol=8 * eps(dtype))
    np.testing.assert_allclose(dx, exact_dx, rtol=40 * eps(dtype), atol=40 * eps(dtype))
    in_place = x.copy()
    kernels.forward(name, in_place, out=in_place, alpha=ALPHA)
    np.testing.assert_array_equal(in_place, y)
    in_place = dy.copy()
    kernels.backward(name, in_place, z, out=in_place, alpha=ALPHA)
    np.testing.assert_array_equal(in_place, dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ULPS)
def test_activation_is_exact_to_a_few_units_of_the_last_place(
    cpu_backend: Backend, name: str, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    small = 10.0 ** rng.uniform(-30, 1, 20000) * rng.choice([-1, 1], 20000)
    x = np.concatenate([rng.uniform(-20, 20, 20000), rng.uniform(-80, 80, 20000), small])
    x = (abs(x) if name == "log" else x).astype(dtype)
    y = np.empty_like(x)
    cpu_backend.elementwise.forward(name, x, out=y, alpha=1.0)
    wide = x.astype("longdouble" if dtype == "float64" else "float64")
    exact = FUNCTIONS[name].forward(np, wide, 1.0)
    assert ulps(y, exact) <= ULPS[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu_exact"])
@pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])
def test_results_below_the_normal_numbers_are_rounded_once(
    cpu_backend: Backend, name: str, dtype: str, reference: bool
) -> None:
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


@pytest.mark.parametrize("name", ["gelu", "gelu_exact", "silu"])
def test_far_from_zero_an_activation_and_its_derivative_are_their_limits(
    cpu_backend: Backend, name: str
) -> None:
    x = np.array([-np.inf, -3e38, -1e20, -200, 200, 1e20, 3e38, np.inf], "float32")
    for kernels in (cpu_backend.elementwise, REFERENCE.elementwise):
        y, dx = np.empty_like(x), np.empty_like(x)
        with np.errstate(over="ignore"):  # a cube, in the argument of the sigmoid
            kernels.forward(name, x, out=y)
            kernels.backward(name, np.full_like(x, 2), x, out=dx)
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        np.testing.assert_array_equal(dx, 2 * (x > 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "gelu_exact"])
def test_an_element_does_not_depend_on_its_neighbours(
    cpu_backend: Backend, name: str, dtype: str
) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_of_special_values_is_that_of_the_reference(
    cpu_backend: Backend, name: str, dtype: str
) -> None:
    # twice, so that whole vectors and the rest both see every value
    x = np.array(SPECIAL * 2 + [np.nan, -np.inf, np.inf], dtype)
    y, expected = np.empty_like(x), np.empty_like(x)
    with np.errstate(all="ignore"):
        cpu_backend.elementwise.forward(name, x, out=y, alpha=ALPHA)
        REFERENCE.elementwise.forward(name, x, out=expected, alpha=ALPHA)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_in_the_gradient_comes_through(cpu_backend: Backend, name: str) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINKS)
def test_derivatives_at_kinks_are_those_of_pytorch(
    cpu_backend: Backend, name: str, dtype: str
) -> None:
    x = np.array([*KINKS[name]], dtype)
    y, dx, kernels = np.empty_like(x), np.empty_like(x), cpu_backend.elementwise
    kernels.forward(name, x, out=y, alpha=ALPHA)
    z = y if FUNCTIONS[name].reads == "output" else x
    kernels.backward(name, np.ones_like(x), z, out=dx, alpha=ALPHA)
    np.testing.assert_array_equal(dx, np.array([*KINKS[name].values()], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_add_is_the_sum_also_in_place(cpu_backend: Backend, n: int, dtype: str) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, n)).astype(dtype)
    out = np.empty_like(a)
    cpu_backend.elementwise.add(a, b, out=out)
    np.testing.assert_array_equal(out, a + b)
    for first, second in ((out, b), (b, out)):
        expected = first + second
        cpu_backend.elementwise.add(first, second, out=out)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_view_with_a_pitch_is_added(cpu_backend: Backend, dtype: str) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 3, 5, 7, 33)).astype(dtype)
    view, other = a[..., :13], b[..., :13].copy()
    cpu_backend.elementwise.add(view, other, out=other)
    np.testing.assert_array_equal(other, a[..., :13] + b[..., :13])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_equals_the_reference_also_in_place(
    cpu_backend: Backend, shape: tuple[int, ...], dtype: str
) -> None:
    x, dy = np.random.default_rng(0).normal(0, 4, (2, *shape)).astype(dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    exact_y, exact_dx = np.empty((2, *shape))
    kernels = cpu_backend.elementwise
    kernels.softmax_forward(x, out=y)
    kernels.softmax_backward(dy, y, out=dx)
    REFERENCE.elementwise.softmax_forward(x.astype(float), out=exact_y)
    REFERENCE.elementwise.softmax_backward(dy.astype(float), y.astype(float), out=exact_dx)
    # the sum adds at most 1000 / 4 terms in a lane
    np.testing.assert_allclose(y, exact_y, rtol=30 * eps(dtype))
    np.testing.assert_allclose(dx, exact_dx, atol=60 * eps(dtype))
    kernels.softmax_forward(x, out=x)
    np.testing.assert_array_equal(x, y)
    kernels.softmax_backward(dy, y, out=dy)
    np.testing.assert_array_equal(dy, dx)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_special_rows_is_that_of_the_reference(cpu_backend: Backend, dtype: str) -> None:
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


def test_an_activation_that_only_the_reference_has_runs(
    cpu_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    square = Activation(lambda xp, x, alpha: x * x, lambda xp, dy, x, alpha: 2 * x * dy, "input")
    monkeypatch.setitem(ACTIVATIONS, "square", square)
    x, out = np.arange(5.0), np.empty(5)
    cpu_backend.elementwise.forward("square", x, out=out)
    np.testing.assert_array_equal(out, x * x)


def test_arrays_of_other_kinds_give_the_same_values(cpu_backend: Backend) -> None:
    x = np.random.default_rng(0).normal(size=(6, 7))
    kernels, out = cpu_backend.elementwise, np.empty((7, 6))
    kernels.forward("relu", x.T, out=out)
    np.testing.assert_array_equal(out, np.maximum(x.T, 0))
    kernels.forward("relu", x, out=out.T)
    np.testing.assert_array_equal(out.T, np.maximum(x, 0))
    half = np.empty((6, 7), "float16")
    kernels.forward("relu", x.astype("float16"), out=half)
    np.testing.assert_array_equal(half, np.maximum(x.astype("float16"), 0))
    kernels.add(x, x[0], out=out.T)  # rows of one shape are broadcast as by NumPy
    np.testing.assert_array_equal(out.T, x + x[0])
    with pytest.raises(ValueError, match="needs 42 elements"):
        kernels.forward("relu", x[:3], out=np.empty((6, 7)))


def test_threads_do_not_change_a_byte(cpu_backend: Backend) -> None:
    x, dy = np.random.default_rng(0).normal(size=(2, 401, 131)).astype("float32")

    def run(backend: Backend) -> list[np.ndarray]:
        kernels, results = backend.elementwise, [np.empty_like(x) for _ in range(7)]
        kernels.forward("gelu", x, out=results[0])
        kernels.backward("gelu", dy, x, out=results[1])
        kernels.add(x, dy, out=results[2])
        kernels.softmax_forward(x, out=results[3])
        kernels.softmax_backward(dy, x, out=results[4])
        kernels.forward("gelu_exact", x, out=results[5])
        kernels.backward("gelu_exact", dy, x, out=results[6])
        return results

    same_for_all_threads(cpu_backend, run)

"""Losses: the reference against the textbook and calculus, the cpu against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels import Backend
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, numeric_gradient

ELEMENTWISE = ("binary_cross_entropy", "squared_error", "absolute_error")
BACKENDS = ("reference", "cpu")
LIKELIHOODS = [("cross_entropy", (0.0,)), ("cross_entropy", (0.1,))]


def choose(name: str, cpu_backend: Backend) -> Backend:
    """The reference or the cpu backend."""
    return REFERENCE if name == "reference" else cpu_backend


def likelihood(x: np.ndarray, t: int, smoothing: float = 0.0) -> float:
    q = (1 - smoothing) * (np.arange(5) == t) + smoothing / 5
    return float(q @ (math.log(sum(map(math.exp, x))) - x))


FORMULAS: dict[str, Callable[..., float]] = {
    "cross_entropy": likelihood,
    "hinge": lambda y, t: sum(max(0.0, 1 + y[k] - y[t]) for k in range(5) if k != t),
    "binary_cross_entropy": lambda x, t: np.mean(np.log1p(np.exp(-x)) + (1 - t) * x),
    "squared_error": lambda y, t: np.mean((y - t) ** 2),
    "absolute_error": lambda y, t: np.mean(abs(y - t)),
}


@each("name, options", [*((name, ()) for name in [*FORMULAS][1:]), *LIKELIHOODS])
def test_a_loss_of_the_reference_sums_that_of_the_textbook_and_has_its_derivative(name, options):
    rng, loss = np.random.default_rng(0), getattr(REFERENCE.loss, name)
    y, target = rng.normal(0, 2, (4, 5)), rng.random((4, 5))
    if name not in ELEMENTWISE:
        target = np.array([0, 4, 2, 2])
    out = np.empty_like(y)
    expected = sum(FORMULAS[name](*pair, *options) for pair in zip(y, target, strict=True))
    assert loss(y, target, *options, 0.5, out=out) == pytest.approx(expected, rel=1e-13)
    spare = np.empty_like(y)
    numeric = numeric_gradient(
        lambda v: np.array(loss(v, target, *options, 0.5, out=spare)), y, 0.5
    )
    np.testing.assert_allclose(out, numeric, atol=1e-8)


def test_a_class_of_weight_0_may_have_any_score(cpu_backend):
    x, out = np.array([[1.0, -np.inf, 2.0]] * 2), np.empty((2, 3))
    args = np.array([1, 2]), np.array([1.0, 0.0, 1.0]), None
    for smoothing in (0.0, 0.1):
        for backend in (REFERENCE, cpu_backend):
            loss = backend.loss.weighted_cross_entropy(x, *args, smoothing, 1.0, out=out)
            assert math.isfinite(loss)
            assert np.isfinite(out).all()


def test_targets_that_are_no_classes_are_refused_unless_ignored(cpu_backend):
    x, out = np.zeros((3, 4)), np.empty((3, 4))
    for target, ignored in (([0, -1, 2], None), ([0, 255, 4], 255), ([0, -1, 2], 7)):
        with pytest.raises(IndexError, match=r"cross_entropy: targets must be in 0\.\.3, got"):
            cpu_backend.loss.weighted_cross_entropy(
                x, np.array(target), None, ignored, 0.0, 1.0, out=out
            )


@each("name", BACKENDS)
@each("kind", ["cross_entropy", "hinge"])
@each("wrong", [-1, 10, 2**40])
def test_a_target_that_is_no_class_is_refused_before_anything_is_written(
    cpu_backend, name, kind, wrong
):
    loss = choose(name, cpu_backend).loss
    x, out = np.zeros((6, 10), "float32"), np.full((6, 10), 7, "float32")
    target = np.array([0, 1, 9, wrong, 3, 10])
    arguments = (0.1, 1.0) if kind == "cross_entropy" else (1.0,)
    with pytest.raises(IndexError, match=rf"{kind}: targets must be in 0..9, got {wrong} in row 3"):
        getattr(loss, kind)(x, target, *arguments, out=out)
    assert np.all(out == 7)


@each("name", BACKENDS)
@each("dtype", DTYPES)
def test_extreme_logits_neither_overflow_nor_lose_the_loss(cpu_backend, name, dtype):
    loss, out = choose(name, cpu_backend).loss, np.empty((1, 3), dtype)
    x = np.array([[1e4, -1e4, 0]], dtype)
    assert loss.cross_entropy(x, np.array([1]), 0.0, 1.0, out=out) == 2e4
    np.testing.assert_array_equal(out, [[1, -1, 0]])
    # a class ruled out costs nothing unless it is the target
    x = np.array([[0, -np.inf, 0]], dtype)
    assert loss.cross_entropy(x, np.array([0]), 0.0, 1.0, out=out) == pytest.approx(math.log(2))
    np.testing.assert_allclose(out, [[-0.5, 0, 0.5]], rtol=1e-6)
    assert loss.cross_entropy(x, np.array([1]), 0.0, 1.0, out=out) == np.inf
    out = np.empty((1, 4), dtype)
    x, target = np.array([[40, -40, 1e4, -1e4]], dtype), np.array([[1, 0, 0, 1]], dtype)
    total = loss.binary_cross_entropy(x, target, 1.0, out=out)
    assert total == pytest.approx((2 * math.exp(-40) + 2e4) / 4)
    np.testing.assert_allclose(out, [[0, 0, 0.25, -0.25]], atol=1e-17)
    tiny = loss.binary_cross_entropy(x[:, :2], target[:, :2], 1.0, out=out[:, :2])
    assert tiny == pytest.approx(math.exp(-40))


@each("name", BACKENDS)
def test_nan_makes_the_loss_nan(cpu_backend, name):
    loss = choose(name, cpu_backend).loss
    x, out = np.zeros((3, 5), "float32"), np.empty((3, 5), "float32")
    x[1, 2] = np.nan
    target, likely = np.array([0, 1, 2]), np.zeros((3, 5), "float32")
    assert math.isnan(loss.cross_entropy(x, target, 0.0, 1.0, out=out))
    assert math.isnan(loss.hinge(x, target, 1.0, out=out))
    for kind in ELEMENTWISE:
        assert math.isnan(getattr(loss, kind)(x, likely, 1.0, out=out))
        assert np.isnan(out[1, 2])


def test_many_small_losses_add_up_in_double(cpu_backend):
    y, out = np.full((2**18, 1), 0.1, "float32"), np.empty((2**18, 1), "float32")
    loss = cpu_backend.loss.absolute_error(y, np.zeros_like(y), 1.0, out=out)
    assert loss == pytest.approx(2**18 * float(np.float32(0.1)), rel=1e-14)


def test_targets_of_other_kinds_are_taken(cpu_backend):
    x, out = np.random.default_rng(0).normal(size=(4, 3)), np.empty((4, 3))
    target = np.array([0, 2, 1, 1])
    expected = cpu_backend.loss.cross_entropy(x, target, 0.0, 1.0, out=out)
    assert cpu_backend.loss.cross_entropy(x, target.astype("uint8"), 0.0, 1.0, out=out) == expected
    doubled = np.repeat(target, 2)[::2]
    assert cpu_backend.loss.cross_entropy(x, doubled, 0.0, 1.0, out=out) == expected
    labels = np.ones((4, 3), "int64")
    square = cpu_backend.loss.squared_error(x, labels, 1.0, out=out)
    assert square == pytest.approx(((x - 1) ** 2).sum() / 3, rel=1e-14)

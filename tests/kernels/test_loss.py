"""Losses: the reference against the textbook and calculus, the cpu against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels import Backend
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient

ELEMENTWISE = ("binary_cross_entropy", "squared_error", "absolute_error")
BACKENDS = ("reference", "cpu")


def choose(name: str, cpu_backend: Backend) -> Backend:
    """The reference or the cpu backend."""
    return REFERENCE if name == "reference" else cpu_backend


def gradient_by_differences(
    loss: Callable[..., float], y: np.ndarray, *arguments: object
) -> np.ndarray:
    """The gradient of a loss by central differences, times the scale of 0.5 that tests use."""
    out = np.empty_like(y)
    return numeric_gradient(lambda v: np.array(loss(v, *arguments, out=out)), y, 0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reference_cross_entropy_is_the_negative_log_likelihood(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    x, target = rng.normal(0, 2, (4, 5)), np.array([0, 4, 2, 2])
    expected = 0.0
    for row, t in zip(x, target, strict=True):
        total = sum(math.exp(v) for v in row)
        for k, v in enumerate(row):
            q = (1 - smoothing) * (k == t) + smoothing / 5
            expected -= q * math.log(math.exp(v) / total)
    out = np.empty_like(x)
    loss = REFERENCE.loss.cross_entropy(x, target, smoothing, 0.5, out=out)
    assert loss == pytest.approx(expected, rel=1e-13)
    numeric = gradient_by_differences(REFERENCE.loss.cross_entropy, x, target, smoothing, 0.5)
    np.testing.assert_allclose(out, numeric, atol=1e-8)


def test_reference_hinge_sums_the_margins_that_are_violated() -> None:
    y, target = np.random.default_rng(0).normal(size=(4, 5)), np.array([0, 4, 2, 2])
    expected = sum(
        max(0.0, 1 + y[i, k] - y[i, t]) for i, t in enumerate(target) for k in range(5) if k != t
    )
    out = np.empty_like(y)
    assert REFERENCE.loss.hinge(y, target, 0.5, out=out) == pytest.approx(expected, rel=1e-13)
    numeric = gradient_by_differences(REFERENCE.loss.hinge, y, target, 0.5)
    np.testing.assert_allclose(out, numeric, atol=1e-8)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_reference_loss_of_outputs_is_the_mean_over_a_sample_summed(name: str) -> None:
    formula = {
        "binary_cross_entropy": lambda x, t: (
            -t * math.log(1 / (1 + math.exp(-x))) - (1 - t) * math.log(1 - 1 / (1 + math.exp(-x)))
        ),
        "squared_error": lambda y, t: (y - t) ** 2,
        "absolute_error": lambda y, t: abs(y - t),
    }[name]
    rng = np.random.default_rng(0)
    y, target, out = rng.normal(size=(3, 2, 2)), rng.random((3, 2, 2)), np.empty((3, 2, 2))
    loss = getattr(REFERENCE.loss, name)
    expected = sum(formula(a, b) for a, b in zip(y.flat, target.flat, strict=True)) / 4
    assert loss(y, target, 0.5, out=out) == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(out, gradient_by_differences(loss, y, target, 0.5), atol=1e-8)


@each("dtype", DTYPES)
@each("smoothing, shape", [(0.0, (7, 3)), (0.1, (3, 16)), (0.1, (301, 17)), (0.1, (0, 3))])
@each("ignored, weighted", [(None, False), (0, True), (-100, True), (-100, False)])
def test_weighted_cross_entropy_equals_the_reference(
    cpu_backend: Backend,
    shape: tuple[int, int],
    smoothing: float,
    dtype: str,
    ignored: int | None,
    weighted: bool,
) -> None:
    rng = np.random.default_rng(0)
    x, target = rng.normal(0, 3, shape).astype(dtype), rng.integers(shape[1], size=shape[0])
    weights = rng.integers(0, 4, shape[1]).astype(dtype) if weighted else None
    if ignored is not None:
        target[rng.random(shape[0]) < 0.3] = ignored
    out, exact = np.full(shape, np.nan, dtype), np.empty(shape)
    args = target, weights, ignored, smoothing, 0.25
    loss = cpu_backend.loss.weighted_cross_entropy(x, *args, out=out)
    expected = REFERENCE.loss.weighted_cross_entropy(x.astype(float), *args, out=exact)
    # exponentials of floats, up to 1000 of them added, with weights up to 3
    assert loss == pytest.approx(expected, rel=20 * eps(dtype), abs=20 * eps(dtype))
    np.testing.assert_allclose(out, exact, rtol=30 * eps(dtype), atol=6 * eps(dtype))
    assert not out[target == ignored].any()


def test_a_class_of_weight_0_may_have_any_score(cpu_backend: Backend) -> None:
    x, out = np.array([[1.0, -np.inf, 2.0]] * 2), np.empty((2, 3))
    args = np.array([1, 2]), np.array([1.0, 0.0, 1.0]), None
    for smoothing in (0.0, 0.1):
        for backend in (REFERENCE, cpu_backend):
            loss = backend.loss.weighted_cross_entropy(x, *args, smoothing, 1.0, out=out)
            assert math.isfinite(loss)
            assert np.isfinite(out).all()


def test_targets_that_are_no_classes_are_refused_unless_ignored(cpu_backend: Backend) -> None:
    x, out = np.zeros((3, 4)), np.empty((3, 4))
    for target, ignored in (([0, -1, 2], None), ([0, 255, 4], 255), ([0, -1, 2], 7)):
        with pytest.raises(IndexError, match=r"cross_entropy: targets must be in 0\.\.3, got"):
            cpu_backend.loss.weighted_cross_entropy(
                x, np.array(target), None, ignored, 0.0, 1.0, out=out
            )


@each("name", BACKENDS)
@each("smoothing", [0.0, 0.1])
@each("shape", [(1, 1), (4, 17), (3, 1000)])
def test_gradients_that_overwrite_the_predictions_have_the_same_bytes(
    cpu_backend: Backend, name: str, shape: tuple[int, int], smoothing: float
) -> None:
    losses, rng = choose(name, cpu_backend).loss, np.random.default_rng(0)
    y, classes = rng.normal(0, 3, shape).astype("float32"), rng.integers(shape[1], size=shape[0])
    weights, target = rng.random(shape[1], "float32"), rng.random(shape, "float32")
    calls: list[tuple[Callable[..., float], tuple[object, ...]]] = [
        (losses.cross_entropy, (classes, smoothing)),
        (losses.weighted_cross_entropy, (classes, weights, 0, smoothing)),
        (losses.weighted_cross_entropy, (target, weights, None, smoothing)),
        (losses.hinge, (classes,)),
        *((getattr(losses, kind), (target,)) for kind in ELEMENTWISE),
    ]
    for loss, arguments in calls:
        apart, own = np.empty_like(y), y.copy()
        assert loss(y, *arguments, 0.25, out=apart) == loss(own, *arguments, 0.25, out=own)
        assert own.tobytes() == apart.tobytes()


@each("name", BACKENDS)
@each("kind", ["cross_entropy", "hinge"])
@each("wrong", [-1, 10, 2**40])
def test_a_target_that_is_no_class_is_refused_before_anything_is_written(
    cpu_backend: Backend, name: str, kind: str, wrong: int
) -> None:
    loss = choose(name, cpu_backend).loss
    x, out = np.zeros((6, 10), "float32"), np.full((6, 10), 7, "float32")
    target = np.array([0, 1, 9, wrong, 3, 10])
    arguments = (0.1, 1.0) if kind == "cross_entropy" else (1.0,)
    with pytest.raises(IndexError, match=rf"{kind}: targets must be in 0..9, got {wrong} in row 3"):
        getattr(loss, kind)(x, target, *arguments, out=out)
    assert np.all(out == 7)


@each("name", BACKENDS)
@each("dtype", DTYPES)
def test_extreme_logits_neither_overflow_nor_lose_the_loss(
    cpu_backend: Backend, name: str, dtype: str
) -> None:
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
def test_nan_makes_the_loss_nan(cpu_backend: Backend, name: str) -> None:
    loss = choose(name, cpu_backend).loss
    x, out = np.zeros((3, 5), "float32"), np.empty((3, 5), "float32")
    x[1, 2] = np.nan
    target, likely = np.array([0, 1, 2]), np.zeros((3, 5), "float32")
    assert math.isnan(loss.cross_entropy(x, target, 0.0, 1.0, out=out))
    assert math.isnan(loss.hinge(x, target, 1.0, out=out))
    for kind in ELEMENTWISE:
        assert math.isnan(getattr(loss, kind)(x, likely, 1.0, out=out))
        assert np.isnan(out[1, 2])


def test_many_small_losses_add_up_in_double(cpu_backend: Backend) -> None:
    y, out = np.full((2**18, 1), 0.1, "float32"), np.empty((2**18, 1), "float32")
    loss = cpu_backend.loss.absolute_error(y, np.zeros_like(y), 1.0, out=out)
    assert loss == pytest.approx(2**18 * float(np.float32(0.1)), rel=1e-14)


def test_targets_of_other_kinds_are_taken(cpu_backend: Backend) -> None:
    x, out = np.random.default_rng(0).normal(size=(4, 3)), np.empty((4, 3))
    target = np.array([0, 2, 1, 1])
    expected = cpu_backend.loss.cross_entropy(x, target, 0.0, 1.0, out=out)
    assert cpu_backend.loss.cross_entropy(x, target.astype("uint8"), 0.0, 1.0, out=out) == expected
    doubled = np.repeat(target, 2)[::2]
    assert cpu_backend.loss.cross_entropy(x, doubled, 0.0, 1.0, out=out) == expected
    labels = np.ones((4, 3), "int64")
    square = cpu_backend.loss.squared_error(x, labels, 1.0, out=out)
    assert square == pytest.approx(((x - 1) ** 2).sum() / 3, rel=1e-14)

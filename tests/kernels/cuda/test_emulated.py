"""Our CUDA kernels emulated on the host: what `test_every_kernel.py` does not ask of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
import pytest

from pydtnn.kernels import Deferred, Term
from pydtnn.kernels.dtypes import DTYPES
from pydtnn.kernels.reference import FusedKernels
from pydtnn.kernels.reference.norm import NormGradient
from tests.kernels.checks import REFERENCE
from tests.kernels.guarded import assert_close
from tests.kernels.test_linear import operands
from tests.simulated.host import families, on_device
from tests.simulated.kernels import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

# one row, one part, several parts that meet; channels for vectors and not, one and several blocks
SHAPES = [(1, 1), (5, 3), (70, 16), (3000, 8), (200, 300), (0, 4)]


def fine(dtype: str) -> str:
    """Type of the coefficients, biases and parameters beside arrays of a type."""
    return "float64" if dtype == "float64" else "float32"


@pytest.fixture(scope="module")
def cuda() -> Any:
    return families()


@pytest.fixture
def draw(rng: np.random.Generator) -> Any:
    def draw(shape: Any, dtype: str = "float64", mean: float = 0) -> Any:
        return on_device(rng.normal(mean, 1, shape).astype(dtype))

    return draw


def flag(value: float) -> Any:
    return on_device(np.array([value]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [(True,), (False,), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_that_gates_differentiates_norms_as_a_kernel_of_its_own(
    cuda, draw, shape, wanted, dtype
):
    channels, kind = shape[1], fine(dtype)
    terms = [Term(draw(shape, dtype), *(draw(channels, kind) for _ in range(2))) for _ in wanted]
    value, dy = Deferred(*terms, shift=draw(channels, kind), relu=True), draw(shape, dtype)
    moments, gamma, before = draw((2, channels)), draw(channels, kind), draw((5, channels), kind)
    both = []
    for way in (FusedKernels.gate_norms, type(cuda.fused).gate_norms):
        results = [on_device(before.copy()) for _ in wanted]
        norms = [
            NormGradient(flag(7.0) if i else 7.0, moments, gamma, *made[:2], made[2:], i == 0)
            if norm
            else None
            for i, (norm, made) in enumerate(zip(wanted, results, strict=True))
        ]
        out, sums = draw(shape, dtype), draw((1 + len(wanted), channels))
        way(cuda.fused, dy, value, norms, out=out, sums=sums)
        both.append([array.tobytes() for array in (out, sums, *results)])
        changed = [made.tobytes() != before.tobytes() for made in results]
        assert changed == list(wanted)
    assert both[0] == both[1]
    assert not cuda.device.arrived.any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_survive_a_mean_of_a_thousand_deviations(cuda, draw, dtype):
    x, dy = draw((5000, 8), dtype, mean=1000), draw((5000, 8), dtype, mean=1)
    exact = np.asarray(x, "float64")
    sums, expected, dsums = (on_device(np.empty(s)) for s in (17, (2, 8), (2, 8)))
    cuda.norm.statistics(x, out=sums)
    mean = sums[1:9] / sums[0]
    # double sums of squares a million times the variance keep ten digits
    np.testing.assert_allclose(sums[9:] / sums[0] - mean * mean, exact.var(axis=0), rtol=2e-6)
    given = x, dy, on_device(exact.mean(axis=0)), draw(8)
    REFERENCE.norm.backward_statistics(*given, out=expected)
    cuda.norm.backward_statistics(*given, out=dsums)
    for row, wanted in zip(dsums, expected, strict=True):
        assert_close(row, wanted, 1e-5 if dtype == "float32" else 1e-10)


def test_arrays_that_are_not_aligned_are_taken_one_by_one(cuda, draw):
    x, y = draw(1002, "float32")[1:], draw(1001, "float32")
    cuda.elementwise.forward("relu", x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


def test_a_target_that_is_no_class_makes_the_loss_nan(cuda, draw):
    x = draw((3, 4))
    for target in (-1, 4):
        classes = on_device(np.array([0, target, 1]))
        for loss in (
            cuda.loss.cross_entropy(x, classes, 0.0, 1.0, out=draw((3, 4))),
            cuda.loss.hinge(x, classes, 1.0, out=draw((3, 4))),
        ):
            assert np.isnan(loss)


@pytest.mark.parametrize("rule", ["sgd", "rmsprop", "adam", "nadam"])
def test_numbers_are_given_or_in_device_memory(cuda, draw, rule):
    start = [abs(draw(2100)) for _ in range(2 if rule == "rmsprop" else 4)]
    options: dict[str, Any] = {"sgd": {"momentum": 0.9, "nesterov": True}, "rmsprop": {"rho": 0.9}}
    given = options.get(rule, {"beta1": 0.9, "beta2": 0.99}) | {"decay": 0.1}
    given |= {"epsilon": 1e-8} if rule != "sgd" else {}
    given |= {"decoupled": True} if rule == "adam" else {}
    given |= {"mu": 0.8, "mu_next": 0.85, "mu_product": 0.7} if rule == "nadam" else {}
    slots = {"sgd": 3, "rmsprop": 3}.get(rule, 4)
    results = []
    for number in (float, flag):
        numbers = {"lr": number(0.2)} | ({"step": number(3.0)} if slots == 4 else {})
        arrays = [on_device(a.copy()) for a in [*start, *start][:slots]]
        getattr(cuda.update, rule)(*arrays, **numbers, **given)
        results.append([a.tobytes() for a in arrays])
    assert results[0] == results[1]


def test_the_epoch_of_dropout_may_be_in_device_memory(cuda, draw):
    x, outs = draw((700, 5)), [on_device(np.empty((700, 5))) for _ in range(2)]
    for epoch, out in zip((5, on_device(np.array(5.0))), outs, strict=True):
        cuda.random.dropout(x, 0.3, 2**32 + 11, 7, epoch, on_device(np.arange(700)), out=out)
    assert outs[0].tobytes() == outs[1].tobytes()


def test_matrices_that_are_not_contiguous_give_the_same_products(cuda, rng):
    arrays = operands(rng, (6, 9, 11))
    x, w, b, dy = (on_device(np.asfortranarray(arrays[name])) for name in ("x", "w", "b", "dy"))
    y, dx, dw, db = (on_device(np.empty_like(a)) for a in (dy, x, w, b))
    cuda.linear.forward(x, w, b, out=y)
    cuda.linear.backward_data(dy, w, out=dx)
    cuda.linear.backward_filter(x, dy, out=dw)
    cuda.linear.backward_bias(dy, out=db)
    for value, expected in ((y, x @ w.T + b), (dx, dy @ w), (dw, dy.T @ x), (db, dy.sum(axis=0))):
        assert_close(value, expected, 1e-12)

"""Numbers that steer a step, in device memory: the reference, and our kernels emulated."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
import pytest

from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE
from tests.simulated.host import families, on_device
from tests.simulated.kernels import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

FLOATS = ("float32", "float64", "float16", "bfloat16")
BAD = (math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def emulated() -> Any:
    return families()


@pytest.fixture(params=["reference", pytest.param("cuda", marks=needs_compiler)])
def families_(request: pytest.FixtureRequest) -> Any:
    """The families of the reference, then ours."""
    return REFERENCE if request.param == "reference" else request.getfixturevalue("emulated")


@pytest.fixture
def update(families_: Any) -> Any:
    return families_.update


def flag(value: float = 1.0) -> Any:
    return on_device(np.array([value], "float64"))


@each("n", [1, 5, 700])
def test_a_total_that_is_not_finite_stops_the_steps_for_good(update, n):
    alive, go = flag(), flag(0)
    update.watch(on_device(np.ones(n)), alive, go)
    assert (alive[0], go[0]) == (1, 1)
    for bad in BAD:
        for place in {0, n // 2, n - 1}:
            totals = on_device(np.ones(n))
            totals[place] = bad
            alive, go = flag(), flag()
            for values in (totals, on_device(np.ones(n))):
                update.watch(values, alive, go)
                assert (alive[0], go[0]) == (0, 0)


@each("dtype", DTYPES)
@each("n", [1, 1031, 5000])
def test_gradients_lose_the_scale_and_tell_what_is_not_finite(update, rng, n, dtype):
    g = on_device(rng.normal(size=n).astype(dtype))
    expected, go = g / np.asarray(1024, dtype), flag()
    update.unscale(g, flag(1024.0), go)
    np.testing.assert_array_equal(g, expected)
    assert go[0] == 1
    for bad in BAD:
        for place in {0, n // 2, n - 1}:
            g, go = on_device(np.ones(n, dtype)), flag()
            g[place] = bad
            update.unscale(g, flag(2.0), go)
            assert go[0] == 0
    update.unscale(on_device(np.ones(n, dtype)), flag(2.0), go)
    assert go[0] == 0, "whoever cleared it decides"


def test_the_scale_of_the_loss_grows_after_good_steps_and_shrinks_after_a_bad_one(update):
    scale, good = flag(64.0), flag(0.0)
    seen = []
    for go in (1, 1, 1, 1, 1, 0, 0, 1, 1, 1):
        update.rescale(scale, good, flag(go), growth=4.0, backoff=0.5, interval=3)
        seen.append((scale[0], good[0]))
    assert [s for s, _ in seen] == [64, 64, 256, 256, 256, 128, 64, 64, 64, 256]
    assert [g for _, g in seen] == [1, 2, 0, 1, 2, 0, 0, 1, 2, 0]


def as_number(families_: Any, value: float) -> Any:
    """A number as the family's own `squared_norm` would give it."""
    return value if families_ is REFERENCE else on_device(np.array(value))


def test_gradients_are_clipped_to_a_norm(families_):
    update = families_.update
    for square, limit, expected in (
        (16.0, 2.0, 0.5),
        (4.0, 2.0, 1.0),
        (1.0, 2.0, 1.0),
        (0.0, 2.0, 1.0),
        (math.inf, 2.0, 1.0),  # the step will not be made
        (math.nan, 2.0, 1.0),
    ):
        for number in (as_number(families_, square), square):
            assert float(update.clip_factor(number, limit)) == expected


def test_learning_rates_follow_the_norms(families_):
    def trust(lr: float, w: float, u: float, factor: float, decay: float) -> float:
        options = {"factor": factor, "decay": decay}
        found = families_.update.trust(*(as_number(families_, v) for v in (lr, w, u)), **options)
        assert float(found) == float(families_.update.trust(lr, w, u, **options))
        return float(found)

    assert trust(0.5, 16.0, 4.0, 0.1, 0.25) == 0.5 * (0.1 * 4 / (2 + 0.25 * 4))
    assert trust(0.5, 16.0, 4.0, 1.0, 0.0) == 1.0
    for w, u in ((0.0, 4.0), (4.0, 0.0)):
        assert trust(0.5, w, u, 0.1, 0.25) == 0.5


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changes_while_the_flag_is_down(emulated, rng, dtype):
    betas = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
    schedule = {"mu": 0.8, "mu_next": 0.85, "mu_product": 0.7}
    arrays = [on_device(abs(rng.normal(size=1030)).astype(dtype)) for _ in range(4)]
    w, g, m, v = arrays
    before = [a.tobytes() for a in arrays]
    update, go = emulated.update, emulated.device.go

    def steps() -> None:
        update.sgd(w, g, None, lr=0.1, decay=0.1, momentum=0.0, nesterov=False)
        update.sgd(w, g, m, lr=0.1, decay=0.1, momentum=0.9, nesterov=False)
        update.rmsprop(w, g, v, lr=0.1, decay=0.1, rho=0.9, epsilon=1e-8)
        update.adam(w, g, m, v, lr=0.1, decay=0.1, step=1, decoupled=True, **betas)
        update.nadam(w, g, m, v, lr=0.1, decay=0.1, step=1, **betas, **schedule)

    go[0] = 0
    try:
        steps()
        assert [a.tobytes() for a in arrays] == before
    finally:
        go[0] = 1
    steps()
    assert all(a.tobytes() != b for a, b in zip((w, m, v), (before[0], *before[2:]), strict=True))


@needs_compiler
def test_nothing_is_folded_while_the_flag_is_down_nor_for_a_layer_that_saw_nothing(emulated, rng):
    sums, running = on_device(abs(rng.normal(5, 1, 7))), on_device(np.ones(6))
    sums[0] = 0
    indices = np.array([[0, 0, 0], [1, 2, 3], [4, 5, 6]])
    before = sums.copy()
    for go in (0, 1):
        emulated.device.go[0] = go
        emulated.norm.fold(sums, running, on_device(indices), on_device(np.full(3, 0.1)))
        assert (running == 1).all()
        np.testing.assert_array_equal(sums, before * (1 - go))


def test_folding_moves_means_and_unbiased_variances(rng):
    x = rng.normal(3, 2, (20, 2))
    sums = np.concatenate([[20], x.sum(axis=0), (x * x).sum(axis=0)])
    running, indices = np.array([1.0, 1, 2, 2]), np.array([[0, 0], [1, 2], [3, 4]])
    REFERENCE.norm.fold(sums, running, indices, np.array([0.5, 0.25]))
    weight = np.array([0.5, 0.25])
    np.testing.assert_allclose(running[:2], 1 + weight * (x.mean(axis=0) - 1), rtol=1e-12)
    np.testing.assert_allclose(running[2:], 2 + weight * (x.var(axis=0, ddof=1) - 2), rtol=1e-12)
    assert not sums.any()


@needs_compiler
@each("accumulate", [False, True])
@each("of, to", product(FLOATS, FLOATS))
def test_arrays_are_converted(emulated, rng, of, to, accumulate):
    for n, offset in ((4099, 0), (4099, 1), (0, 0)):
        x = on_device(rng.normal(size=n + offset).astype(of))[offset:]
        own, expected = (on_device(np.ones(n, to)) for _ in range(2))
        emulated.elementwise.convert(x, out=own, accumulate=accumulate)
        REFERENCE.elementwise.convert(x, out=expected, accumulate=accumulate)
        # from float64 to 16 bits it may be rounded twice
        twice = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(to, 0) if of == "float64" else 0
        wide = (array.astype("float64") for array in (own, expected))
        np.testing.assert_allclose(*wide, rtol=twice)


def test_what_is_beyond_the_range_becomes_infinite(families_):
    out = on_device(np.empty(3, "float16"))
    families_.elementwise.convert(on_device(np.array([1e5, -1e5, 1], "float32")), out=out)
    np.testing.assert_array_equal(out, [math.inf, -math.inf, 1])

"""Numbers that steer a step, in device memory: the reference, and our kernels emulated."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
import pytest

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


@pytest.mark.parametrize("n", [1, 5, 700])
def test_a_total_that_is_not_finite_stops_the_steps_for_good(update: Any, n: int) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 1031, 5000])
def test_gradients_lose_the_scale_and_tell_what_is_not_finite(
    update: Any, rng: np.random.Generator, n: int, dtype: str
) -> None:
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


def test_the_scale_of_the_loss_grows_after_good_steps_and_shrinks_after_a_bad_one(
    update: Any,
) -> None:
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


def test_gradients_are_clipped_to_a_norm(families_: Any) -> None:
    update = families_.update
    for square, limit, expected in (
        (16.0, 2.0, 0.5),
        (4.0, 2.0, 1.0),
        (1.0, 2.0, 1.0),
        (0.0, 2.0, 1.0),
        (math.inf, 2.0, 1.0),  # the step will not be made
        (math.nan, 2.0, 1.0),
    ):
        assert float(update.clip_factor(as_number(families_, square), limit)) == expected


def test_learning_rates_follow_the_norms(families_: Any) -> None:
    def trust(lr: float, w: float, u: float, factor: float, decay: float) -> float:
        lr, w, u = (as_number(families_, value) for value in (lr, w, u))
        return float(families_.update.trust(lr, w, u, factor=factor, decay=decay))

    assert trust(0.5, 16.0, 4.0, 0.1, 0.25) == 0.5 * (0.1 * 4 / (2 + 0.25 * 4))
    assert trust(0.5, 16.0, 4.0, 1.0, 0.0) == 1.0
    for w, u in ((0.0, 4.0), (4.0, 0.0)):
        assert trust(0.5, w, u, 0.1, 0.25) == 0.5


@needs_compiler
def test_numbers_of_the_host_are_taken_too(emulated: Any) -> None:
    assert float(emulated.update.clip_factor(16.0, 2.0)) == 0.5
    assert float(emulated.update.trust(0.5, 16.0, 4.0, factor=1.0, decay=0.0)) == 1.0


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changes_while_the_flag_is_down(
    emulated: Any, rng: np.random.Generator, dtype: str
) -> None:
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


LAYERS = [(3, 0.5), (300, 0.1), (1, 1.0), (2, 0.1)]


def folded(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arguments of `fold`: layers that saw ten rows, one row, and none."""
    sums, indices, momentum = [], [], []
    for (channels, weight), rows in zip(LAYERS, (10, 10, 1, 0), strict=True):
        x, start = rng.normal(3, 2, (rows, channels)), sum(map(len, sums))
        sums.append(np.concatenate([[rows], x.sum(axis=0), (x * x).sum(axis=0)]))
        own = start + 1 + np.arange(channels)
        indices.append(np.stack([np.full(channels, start), own, own + channels]))
        momentum.append(np.full(channels, weight))
    total = sum(channels for channels, _ in LAYERS)
    running = np.concatenate([np.zeros(total), np.ones(total)])
    return np.concatenate(sums), running, np.hstack(indices), np.concatenate(momentum)


@needs_compiler
def test_running_statistics_are_folded(emulated: Any, rng: np.random.Generator) -> None:
    arrays = folded(rng)
    own, held = ([on_device(a.copy()) for a in arrays] for _ in range(2))
    emulated.device.go[0] = 0
    emulated.norm.fold(*held)
    emulated.device.go[0] = 1
    for actual, expected in zip(held, arrays, strict=True):
        np.testing.assert_array_equal(actual, expected)
    REFERENCE.norm.fold(*arrays)
    emulated.norm.fold(*own)
    sums, running = arrays[:2]
    np.testing.assert_allclose(own[1], running, rtol=1e-14)
    assert not own[0].any()
    assert not sums.any()
    assert not emulated.device.arrived.any()
    assert (running[-2:] == 1).all(), "a layer that saw nothing stays"


def test_folding_moves_means_and_unbiased_variances(rng: np.random.Generator) -> None:
    x = rng.normal(3, 2, (20, 2))
    sums = np.concatenate([[20], x.sum(axis=0), (x * x).sum(axis=0)])
    running, indices = np.array([1.0, 1, 2, 2]), np.array([[0, 0], [1, 2], [3, 4]])
    REFERENCE.norm.fold(sums, running, indices, np.array([0.5, 0.25]))
    weight = np.array([0.5, 0.25])
    np.testing.assert_allclose(running[:2], 1 + weight * (x.mean(axis=0) - 1), rtol=1e-12)
    np.testing.assert_allclose(running[2:], 2 + weight * (x.var(axis=0, ddof=1) - 2), rtol=1e-12)
    assert not sums.any()


@needs_compiler
def test_rows_of_backward_may_be_in_device_memory(emulated: Any, rng: np.random.Generator) -> None:
    sums, moments = (on_device(rng.normal(size=(2, 5))) for _ in range(2))
    pivot, gamma = (on_device(rng.normal(size=5)) for _ in range(2))
    results = []
    for norm, rows in ((REFERENCE.norm, 7), (emulated.norm, 7.0), (emulated.norm, flag(7.0))):
        dgamma, dbeta, out = np.empty(5), np.empty(5), np.empty((3, 5))
        norm.backward_coefficients(
            *(sums, rows, moments, pivot, gamma),
            **{
                name: on_device(array)
                for name, array in (("dgamma", dgamma), ("dbeta", dbeta), ("out", out))
            },
        )
        results.append(np.concatenate([dgamma, dbeta, out.ravel()]))
    for actual in results[1:]:
        np.testing.assert_allclose(actual, results[0], rtol=1e-13)


@needs_compiler
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("of", FLOATS)
def test_arrays_are_converted(
    emulated: Any, rng: np.random.Generator, of: str, to: str, accumulate: bool
) -> None:
    for n, offset in ((1, 0), (4099, 0), (4099, 1), (0, 0)):
        x = on_device(rng.normal(size=n + offset).astype(of))[offset:]
        start = on_device(rng.normal(size=n).astype(to))
        own, expected = start.copy(), start.copy()
        emulated.elementwise.convert(x, out=own, accumulate=accumulate)
        REFERENCE.elementwise.convert(x, out=expected, accumulate=accumulate)
        if of == "float64" and to in ("float16", "bfloat16"):  # may be rounded twice
            bound = 2.0 ** (-10 if to == "float16" else -7)
            np.testing.assert_allclose(
                own.astype("float64"), expected.astype("float64"), rtol=bound
            )
        else:
            assert own.tobytes() == expected.tobytes()


def test_what_is_beyond_the_range_becomes_infinite(families_: Any) -> None:
    out = on_device(np.empty(3, "float16"))
    families_.elementwise.convert(on_device(np.array([1e5, -1e5, 1], "float32")), out=out)
    np.testing.assert_array_equal(out, [math.inf, -math.inf, 1])

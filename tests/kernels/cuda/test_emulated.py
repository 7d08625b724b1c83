"""Our CUDA kernels against the reference, without a GPU: the same sources, emulated on the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np
import pytest

from pydtnn.kernels import Deferred, Term
from pydtnn.kernels.reference import Fused, Norm
from pydtnn.kernels.reference.elementwise import ACTIVATIONS
from pydtnn.kernels.reference.norm import NormGradient
from tests.kernels.checks import DTYPES, REFERENCE
from tests.simulated.host import families, on_device
from tests.simulated.kernels import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

# one row, one part, several parts that meet; channels for vectors and not, one and several blocks
SHAPES = [(1, 1), (5, 3), (70, 16), (3000, 8), (200, 300), (0, 4)]
# of the 16-bit types, half a unit in the last place, twice: the reference rounds on the way
BOUNDS = {"float32": 1e-5, "float64": 1e-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SAMPLES = on_device(np.arange(700))


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


def blank(*like: Any) -> list[list[Any]]:
    """Two sets of arrays full of NaN, for the reference and for us."""
    return [[on_device(np.full(a.shape, np.nan, a.dtype)) for a in like] for _ in range(2)]


def assert_close(actual: Any, expected: Any, bound: float) -> None:
    """Hold arrays together in norm, and demand that nothing is NaN."""
    actual, expected = (np.asarray(a, "float64") for a in (actual, expected))
    assert actual.shape == expected.shape
    error, size = (float(np.linalg.norm(a)) for a in (actual - expected, expected))
    assert error <= bound * max(size, 1e-30), f"{error} in norm"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_deferred_arrays(
    cuda: Any, draw: Any, shape: tuple[int, int], terms: int, dtype: str
) -> None:
    channels, kind = shape[1], fine(dtype)
    xs = [draw(shape, dtype, mean=3) for _ in range(terms)]
    first = Term(xs[0], draw(channels, kind), draw(channels, kind))
    value = Deferred(*[first, *map(Term, xs[1:])], shift=draw(channels, kind), relu=True)
    dy, add = draw(shape, dtype), draw(shape, dtype)
    sums = np.empty((1 + terms, channels))
    for more in (None, add):
        outs = blank(dy, dy, dy, sums)
        for family, (y, dx, plain, total) in zip((REFERENCE.fused, cuda.fused), outs, strict=True):
            family.evaluate(value, out=y)
            family.gate(dy, value, out=dx, sums=total, add=more)
            family.gate(dy, value, out=plain, add=more)
        for expected, actual in zip(*outs, strict=True):
            assert_close(actual, expected, BOUNDS[dtype])
    assert not cuda.device.arrived.any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(cuda: Any, draw: Any, shape: tuple[int, int], dtype: str) -> None:
    channels, bound, kind = shape[1], BOUNDS[dtype], fine(dtype)
    x, dy = draw(shape, dtype, mean=5), draw(shape, dtype)
    gamma, beta = draw(channels, kind), draw(channels, kind)
    a, b, c = (draw(channels) for _ in range(3))
    start = draw(1 + 2 * channels)
    outs = blank(x, x, np.empty((2, channels)), np.empty((3, channels), kind), gamma, gamma)
    results = []
    for norm, (y, dx, moments, maps, dgamma, dbeta) in zip(
        (REFERENCE.norm, cuda.norm), outs, strict=True
    ):
        sums, dsums = start.copy(), draw((2, channels)) * 0 + 1
        norm.statistics(x, out=sums, accumulate=True)
        norm.backward_statistics(x, dy, a, b, out=dsums, accumulate=True)
        norm.normalize(x, a, b, out=y)
        norm.backward_normalize(x, dy, a, b, c, out=dx)
        fresh = on_device(np.full(1 + 2 * channels, np.nan))
        REFERENCE.norm.statistics(x, out=fresh)
        norm.coefficients(fresh, gamma, beta, 1e-5, moments=moments, out=maps)
        norm.backward_coefficients(
            *(dsums, max(len(x), 1), moments, maps[0].copy(), gamma),
            dgamma=dgamma,
            dbeta=dbeta,
            out=maps,
        )
        results.append((sums, dsums, y, dx, moments, maps, dgamma, dbeta))
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, bound)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_that_sums_makes_the_coefficients_of_a_kernel_of_their_own(
    cuda: Any, draw: Any, shape: tuple[int, int], dtype: str
) -> None:
    channels, kind = shape[1], fine(dtype)
    x, gamma, beta = draw(shape, dtype, mean=5), draw(channels, kind), draw(channels, kind)
    sums, moments, collect = draw(1 + 2 * channels), draw((2, channels)), draw(1 + 2 * channels)
    both = []
    for way in (Norm.statistics_coefficients, type(cuda.norm).statistics_coefficients):
        made = {"sums": sums, "moments": moments, "out": draw((3, channels), kind) * 0}
        made["collect"] = on_device(collect.copy())
        way(cuda.norm, x, gamma, beta, 1e-5, **made)
        both.append([array.tobytes() for array in made.values()])
    assert both[0] == both[1]
    assert not cuda.device.arrived.any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("wanted", [(True,), (False,), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_that_gates_differentiates_norms_as_a_kernel_of_its_own(
    cuda: Any, draw: Any, shape: tuple[int, int], wanted: tuple[bool, ...], dtype: str
) -> None:
    channels, kind = shape[1], fine(dtype)
    terms = [Term(draw(shape, dtype), *(draw(channels, kind) for _ in range(2))) for _ in wanted]
    value, dy = Deferred(*terms, shift=draw(channels, kind), relu=True), draw(shape, dtype)
    moments, gamma, before = draw((2, channels)), draw(channels, kind), draw((5, channels), kind)
    both = []
    for way in (Fused.gate_norms, type(cuda.fused).gate_norms):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_backward_survive_a_mean_of_a_thousand_deviations(
    cuda: Any, draw: Any, dtype: str
) -> None:
    x, dy = draw((5000, 8), dtype, mean=1000), draw((5000, 8), dtype, mean=1)
    mean, inv_std = on_device(np.asarray(x, "float64").mean(axis=0)), draw(8)
    ((expected,), (sums,)) = blank(np.empty((2, 8)))
    REFERENCE.norm.backward_statistics(x, dy, mean, inv_std, out=expected)
    cuda.norm.backward_statistics(x, dy, mean, inv_std, out=sums)
    for given, exact in zip(sums, expected, strict=True):
        assert_close(given, exact, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_survive_a_mean_of_a_thousand_deviations(
    cuda: Any, draw: Any, dtype: str
) -> None:
    x = draw((5000, 8), dtype, mean=1000)
    sums = on_device(np.empty(17))
    cuda.norm.statistics(x, out=sums)
    exact = np.asarray(x, "float64").var(axis=0)
    mean = sums[1:9] / sums[0]
    # double sums of squares a million times the variance keep ten digits
    np.testing.assert_allclose(sums[9:] / sums[0] - mean * mean, exact, rtol=2e-6)


# vectors and not; held by a warp, by a block, too long for that; samples that end within a block
GROUPS = [
    ((3, 7, 8), 2),
    ((9, 1, 50), 1),
    ((2, 300, 6), 1),
    ((5, 3, 64), 4),
    ((2, 1, 3000), 1),
    ((2, 70, 512), 2),
    ((40, 5, 24), 3),
]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("shape", "groups"), GROUPS)
def test_group_norm(
    cuda: Any, draw: Any, shape: tuple[int, int, int], groups: int, dtype: str
) -> None:
    x, dy = draw(shape, dtype, mean=2), draw(shape, dtype)
    gamma, beta = draw(shape[2], fine(dtype)), draw(shape[2], fine(dtype))
    statistics = np.empty((shape[0], groups))
    outs = blank(x, statistics, statistics, x, gamma, gamma)
    for norm, (y, mean, inv_std, dx, dgamma, dbeta) in zip(
        (REFERENCE.norm, cuda.norm), outs, strict=True
    ):
        norm.group_forward(x, gamma, beta, groups, 1e-5, out=y, mean=mean, inv_std=inv_std)
        norm.group_backward(
            *(x, dy, gamma, groups, mean, inv_std), out=dx, dgamma=dgamma, dbeta=dbeta
        )
    for expected, actual in zip(*outs, strict=True):
        assert_close(actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_outputs_may_be_inputs(cuda: Any, draw: Any, dtype: str) -> None:
    x, dy, table = draw((700, 8), dtype), draw((700, 8), dtype), draw(8, fine(dtype))
    value = Deferred(Term(x.copy(), table, table), relu=True)
    cases = (
        (dy, lambda out, source: cuda.fused.gate(source, value, out=out)),
        (x, lambda out, source: cuda.fused.evaluate(Deferred(Term(source, table)), out=out)),
        (
            dy,
            lambda out, source: cuda.norm.backward_normalize(
                x, source, table, table, table, out=out
            ),
        ),
        (x, lambda out, source: cuda.elementwise.forward("gelu", source, out=out)),
        (dy, lambda out, source: cuda.elementwise.softmax_backward(source, x, out=out)),
        (dy, lambda out, source: cuda.random.dropout(source, 0.3, 1, 2, 3, SAMPLES, out=out)),
    )
    for source, kernel in cases:
        expected, own = on_device(np.empty_like(source)), on_device(source.copy())
        kernel(expected, source)
        kernel(own, own)
        assert own.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [1, 7, 1024, 5003])
def test_activations_and_sums(cuda: Any, draw: Any, size: int, dtype: str) -> None:
    dy, other = draw(size, dtype), draw(size, dtype)
    for name, activation in ACTIVATIONS.items():
        x = draw(size, dtype) * np.asarray(4, dtype)  # beyond the 6 of relu6
        x = on_device(np.abs(x) + 1).astype(dtype) if name == "log" else x
        outs = blank(x, x)
        for family, (y, dx) in zip((REFERENCE.elementwise, cuda.elementwise), outs, strict=True):
            family.forward(name, x, out=y, alpha=0.3)
            z = outs[0][0] if activation.reads == "output" else x
            family.backward(name, dy, z, out=dx, alpha=0.3)
        for expected, actual in zip(*outs, strict=True):
            assert_close(actual, expected, BOUNDS[dtype])
    total = on_device(np.empty_like(dy))
    cuda.elementwise.add(dy, other, out=total)
    np.testing.assert_array_equal(total, dy + other)


def test_arrays_that_are_not_aligned_are_taken_one_by_one(cuda: Any, draw: Any) -> None:
    x, y = draw(1002, "float32")[1:], draw(1001, "float32")
    cuda.elementwise.forward("relu", x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 1), (9, 10), (3, 1500), (70, 64), (2, 9001)])
def test_softmax_and_losses(cuda: Any, draw: Any, shape: tuple[int, int], dtype: str) -> None:
    x, dy = (3 * draw(shape)).astype(dtype), draw(shape, dtype)
    numbers = on_device(np.abs(np.tanh(draw(shape))).astype(dtype))
    classes = on_device(np.arange(shape[0]) * 7 % shape[1])
    outs = blank(*[x] * 8, np.empty(6))
    for backend, (y, dx, *grads, losses) in zip((REFERENCE, cuda), outs, strict=True):
        backend.elementwise.softmax_forward(x, out=y)
        backend.elementwise.softmax_backward(dy, outs[0][0], out=dx)
        loss = backend.loss
        losses[0] = loss.cross_entropy(x, classes, 0.0, 0.5, out=grads[0])
        losses[1] = loss.cross_entropy(x, classes, 0.1, 0.5, out=grads[1])
        losses[2] = loss.hinge(x, classes, 0.5, out=grads[2])
        losses[3] = loss.binary_cross_entropy(x, numbers, 0.5, out=grads[3])
        losses[4] = loss.squared_error(x, numbers, 0.5, out=grads[4])
        losses[5] = loss.absolute_error(x, numbers, 0.5, out=grads[5])
    for expected, actual in zip(*outs, strict=True):
        assert_close(actual, expected, BOUNDS[dtype])


def test_a_target_that_is_no_class_makes_the_loss_nan(cuda: Any, draw: Any) -> None:
    x = draw((3, 4))
    for target in (-1, 4):
        classes = on_device(np.array([0, target, 1]))
        for loss in (
            cuda.loss.cross_entropy(x, classes, 0.0, 1.0, out=draw((3, 4))),
            cuda.loss.hinge(x, classes, 1.0, out=draw((3, 4))),
        ):
            assert np.isnan(loss)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2100])
def test_updates_with_numbers_given_and_in_device_memory(
    cuda: Any, draw: Any, size: int, dtype: str
) -> None:
    w, g, m, v = draw(size, dtype), draw(size, dtype), draw(size, dtype), abs(draw(size, dtype))
    rate = 0.1 if size == 1 else 0.2  # other numbers than those that a kernel may still hold
    on_gpu = {name: on_device(np.array([n])) for name, n in (("lr", rate), ("step", 3.0))}
    betas = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
    schedule = {"mu": 0.8, "mu_next": 0.85, "mu_product": 0.7}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("sgd", 0, {"decay": 0.1, "momentum": 0.0, "nesterov": False}),
        ("sgd", 1, {"decay": 0.1, "momentum": 0.9, "nesterov": False}),
        ("sgd", 1, {"decay": 0.1, "momentum": 0.9, "nesterov": True}),
        ("rmsprop", 1, {"decay": 0.1, "rho": 0.9, "epsilon": 1e-8}),
        ("adam", 2, {"decay": 0.1, "decoupled": False, **betas}),
        ("adam", 2, {"decay": 0.1, "decoupled": True, **betas}),
        ("nadam", 2, {"decay": 0.1, **betas, **schedule}),
    ]
    for rule, slots, options in cases:
        has_step = "beta1" in options
        given: dict[str, Any] = {"lr": rate, **({"step": 3} if has_step else {})}
        results = []
        for family, numbers in (
            (REFERENCE.update, given),
            (cuda.update, given),
            (cuda.update, {name: on_gpu[name] for name in given}),
        ):
            state = [v, m][:1] if rule == "rmsprop" else [m, v][:slots]
            arrays = [on_device(a.copy()) for a in (w, *state)]
            own, *kept = arrays
            if rule == "sgd":
                kept = kept or [None]
            getattr(family, rule)(own, g, *kept, **numbers, **options)
            results.append(arrays)
        for actual in results[1:]:
            for a, e in zip(actual, results[0], strict=True):
                assert_close(a, e, BOUNDS[dtype])
    assert_close(cuda.update.squared_norm(w), REFERENCE.update.squared_norm(w), 1e-12)
    scaled = on_device(w.copy())
    cuda.update.scale(scaled, 0.25)
    np.testing.assert_array_equal(scaled, w * w.dtype.type(0.25))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 5, 7), (70, 16, 4), (3, 5000)])
def test_dropout_has_the_bytes_of_the_reference(
    cuda: Any, draw: Any, shape: tuple[int, ...], dtype: str
) -> None:
    x = draw(shape, dtype)
    samples = on_device(3 * np.arange(len(x)) + 2**33)
    (expected,), (y,) = blank(x)
    REFERENCE.random.dropout(x, 0.3, 2**32 + 11, 7, 5, samples, out=expected)
    for epoch in (5, on_device(np.array(5.0))):
        cuda.random.dropout(x, 0.3, 2**32 + 11, 7, epoch, samples, out=y)
        assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fully_connected_layers(cuda: Any, draw: Any, shape: tuple[int, int], dtype: str) -> None:
    x, w, b = draw((shape[0], 5), dtype), draw((shape[1], 5), dtype), draw(shape[1], fine(dtype))
    dy, start = draw(shape, dtype), draw(shape[1], fine(dtype))
    outs = blank(dy, b)
    for linear, (y, db) in zip((REFERENCE.linear, cuda.linear), outs, strict=True):
        linear.forward(x, w, b, out=y)
        linear.backward_bias(dy, out=db)
        linear.backward_bias(dy, out=start.copy(), accumulate=True)
    for expected, actual in zip(*outs, strict=True):
        assert_close(actual, expected, BOUNDS[dtype])

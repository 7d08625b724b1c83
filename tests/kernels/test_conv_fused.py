"""What compiled convolutions do in passing, against the reference, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, create_backend
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.reference import Conv as Reference
from pydtnn.kernels.reference import Fused
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded
from tests.kernels.test_conv import ALGORITHMS, AWKWARD, TOLERANCE, cast, geometry, operands
from tests.kernels.test_fused import away_from_zero, deferred
from tests.kernels.test_fused import cast as cast_deferred

REFERENCE = Reference(np)
DTYPES = [np.float32, np.float64]

# Of the largest of the terms of a sum times their number. Up to 256 terms are added in their own
# type relative to the first of them; where that is the largest and most others are 0, their
# roundings all have one sign and add up.
SUMS = {np.float32: 4e-6, np.float64: 1e-14}


def inputs(batch: int, geometry: ConvGeometry) -> tuple[int, ...]:
    """Shape of x."""
    return (batch, *geometry.size, geometry.channels)


def outputs(batch: int, geometry: ConvGeometry) -> tuple[int, ...]:
    """Shape of y."""
    return (batch, *geometry.output, geometry.filters)


def empty(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """An array full of NaN, between guards."""
    return guarded(np.full(shape, np.nan, dtype))


def assert_sums_close(value: np.ndarray, factors: list[np.ndarray], tolerance: float) -> None:
    """Assert that rows of `value` are sums of the first factor, alone and times each other one."""
    first = factors[0].reshape(-1, factors[0].shape[-1])
    for row, factor in zip(value, [np.ones_like(first), *factors[1:]], strict=True):
        terms = first * factor.reshape(first.shape)
        largest = np.abs(terms).max(axis=0, initial=0)
        # Along the last axis NumPy sums in pairs; along the first its own error is larger.
        total = np.ascontiguousarray(terms.T).sum(axis=1)
        assert (np.abs(row - total) <= tolerance * len(terms) * largest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_forward_of_a_deferred_input_agrees_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str, dtype: Any
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = cast(operands(rng, batch, geometry), dtype)
    x = deferred(rng, inputs(batch, geometry), dtype, terms=1 + len(case) % 2)
    exact = cast_deferred(x, np.float64)
    for relu in (False, True):
        y, store = empty(outputs(batch, geometry), dtype), empty(x.shape, dtype)
        sums = empty((1 + 2 * geometry.filters,))
        expected = np.empty(y.shape)
        cpu_backend.conv.forward(
            *(x, arrays["w"], arrays["b"], geometry),
            out=y,
            relu=relu,
            store=store,
            sums=sums,
            algorithm=algorithm,
        )
        REFERENCE.forward(exact, arrays["w"], arrays["b"], geometry, out=expected, relu=relu)
        for array in (y, store, sums):
            assert_guards_hold(array)
        assert_close(y, expected, TOLERANCE[dtype])
        assert_close(store, Fused(np).values(exact), TOLERANCE[dtype])
        assert sums[0] == batch * np.prod(geometry.output)
        result = y.astype(np.float64)
        assert_sums_close(sums[1:].reshape(2, -1), [result, result], SUMS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_backward_of_data_through_a_gate_agrees_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str, dtype: Any
) -> None:
    batch, geometry = AWKWARD[case]
    w = operands(rng, batch, geometry)["w"].astype(dtype)
    shape, terms = inputs(batch, geometry), 1 + len(case) % 2
    dy = deferred(rng, outputs(batch, geometry), dtype, terms=2, relu=False)
    gate = deferred(rng, shape, dtype, terms=terms)
    away_from_zero(gate)
    exact_dy, exact_gate = cast_deferred(dy, np.float64), cast_deferred(gate, np.float64)
    for added in ("nothing", "another array", "the output"):
        add = guarded(rng.standard_normal(shape).astype(dtype)) if added != "nothing" else None
        expected = np.empty(shape)
        REFERENCE.backward_data(exact_dy, w, geometry, out=expected, add=add, gate=exact_gate)
        out = add if added == "the output" and add is not None else empty(shape, dtype)
        sums = empty((1 + terms, geometry.channels))
        cpu_backend.conv.backward_data(
            *(dy, w, geometry), out=out, add=add, gate=gate, sums=sums, algorithm=algorithm
        )
        assert_guards_hold(out)
        assert_guards_hold(sums)
        assert_close(out, expected, TOLERANCE[dtype])
        centred = [t.x.astype(np.float64) - t.pivot for t in gate.terms]
        assert_sums_close(sums, [out.astype(np.float64), *centred], SUMS[dtype])


@pytest.mark.parametrize("added", ["nothing", "another array", "the output"])
@pytest.mark.parametrize("gated", ["no gate", "kept values", "no ReLU"])
@pytest.mark.parametrize("case", ["primes", "stride 2", "depthwise", "three vectors of filters"])
def test_backward_of_data_does_what_it_is_told_to(
    cpu_backend: Backend, rng: np.random.Generator, case: str, gated: str, added: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays, shape = operands(rng, batch, geometry), inputs(batch, geometry)
    add = None if added == "nothing" else rng.standard_normal(shape)
    gate = None
    if gated != "no gate":
        gate = deferred(rng, shape, terms=2, relu=gated == "kept values")
        gate.array = rng.standard_normal(shape) if gated == "kept values" else None
    expected = np.empty(shape)
    REFERENCE.backward_data(arrays["dy"], arrays["w"], geometry, out=expected, add=add, gate=gate)
    out = add if added == "the output" and add is not None else empty(shape)
    cpu_backend.conv.backward_data(arrays["dy"], arrays["w"], geometry, out=out, add=add, gate=gate)
    assert_close(out, expected, 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_backward_of_filters_of_deferred_arrays_agrees_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str, dtype: Any
) -> None:
    batch, geometry = AWKWARD[case]
    x = deferred(rng, inputs(batch, geometry), dtype)
    dy = deferred(rng, outputs(batch, geometry), dtype, terms=2, relu=False)
    expected, out = np.empty(geometry.weight_shape), empty(geometry.weight_shape, dtype)
    exact = [cast_deferred(value, np.float64) for value in (x, dy)]
    REFERENCE.backward_filter(*exact, geometry, out=expected)
    for arrays in ((x, dy), (x, REFERENCE._values(dy)), (REFERENCE._values(x), dy)):
        cpu_backend.conv.backward_filter(*arrays, geometry, out=out, algorithm=algorithm)
        assert_guards_hold(out)
        assert_close(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_both_gradients_at_once_agree_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    w = operands(rng, batch, geometry)["w"]
    x = deferred(rng, inputs(batch, geometry), terms=1 + len(case) % 2)
    dy = deferred(rng, outputs(batch, geometry), terms=2, relu=False)
    add = guarded(rng.standard_normal(x.shape))
    sums = empty((1 + len(x.terms), x.shape[-1]))
    dx, dw, exact = np.empty(x.shape), np.empty(w.shape), np.empty(sums.shape)
    for gate, out in ((x, empty(x.shape)), (None, empty(x.shape)), (x, add)):
        options: dict[str, Any] = {"add": add, "gate": gate, "accumulate": gate is None}
        before = guarded(rng.standard_normal(w.shape))
        dw[...] = before
        REFERENCE.backward(x, dy, w, geometry, dx=dx, dw=dw, sums=exact, **options)
        cpu_backend.conv.backward(
            *(x, dy, w, geometry), dx=out, dw=before, sums=sums, algorithm=algorithm, **options
        )
        for array in (out, before, sums):
            assert_guards_hold(array)
        assert_close(out, dx, 1e-12)
        assert_close(before, dw, 1e-12)
        if gate is not None:
            assert_close(sums, exact, 1e-12)


@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    w = operands(rng, batch, geometry)["w"].astype(np.float32)
    x = deferred(rng, inputs(batch, geometry), np.float32)
    dy = deferred(rng, outputs(batch, geometry), np.float32, relu=False)
    results = []
    for threads in (1, 2, 5):
        conv = create_backend("cpu", threads=threads, isa=cpu_backend.isa).conv
        y, store, dx, dw = (np.empty(s, np.float32) for s in (dy.shape, x.shape, x.shape, w.shape))
        moments, sums = np.empty(1 + 2 * geometry.filters), np.empty((2, geometry.channels))
        options: dict[str, Any] = {"algorithm": algorithm}
        conv.forward(x, w, None, geometry, out=y, store=store, sums=moments, **options)
        conv.backward(x, dy, w, geometry, dx=dx, dw=dw, gate=x, sums=sums, **options)
        results.append([a.tobytes() for a in (y, store, moments, dx, dw, sums)])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("case", ["16 filters", "several images to a block", "pointwise"])
def test_statistics_are_right_when_the_mean_is_a_thousand_times_the_deviation(
    cpu_backend: Backend, rng: np.random.Generator, case: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = cast(operands(rng, batch, geometry), np.float32)
    arrays["b"][...] = 0
    y, sums = empty(outputs(batch, geometry), np.float32), np.empty(1 + 2 * geometry.filters)
    cpu_backend.conv.forward(arrays["x"], arrays["w"], arrays["b"], geometry, out=y)
    arrays["b"][...] = 1000 * y.std(axis=(0, 1, 2))
    cpu_backend.conv.forward(arrays["x"], arrays["w"], arrays["b"], geometry, out=y, sums=sums)
    count, total, squares = sums[0], *sums[1:].reshape(2, -1)
    exact = y.astype(np.float64)
    np.testing.assert_allclose(total / count, exact.mean(axis=(0, 1, 2)), rtol=1e-9)
    variance = squares / count - (total / count) ** 2
    np.testing.assert_allclose(variance, exact.var(axis=(0, 1, 2)), rtol=1e-4)


@pytest.mark.parametrize("case", ["rows of a large image", "16 filters", "pointwise, stride 2"])
def test_a_store_may_be_the_array_of_a_term(
    cpu_backend: Backend, rng: np.random.Generator, case: str
) -> None:
    batch, geometry = AWKWARD[case]
    w = operands(rng, batch, geometry)["w"]
    x = deferred(rng, inputs(batch, geometry))
    values, expected = Fused(np).values(x), np.empty(outputs(batch, geometry))
    REFERENCE.forward(x, w, None, geometry, out=expected)
    out = np.empty_like(expected)
    cpu_backend.conv.forward(x, w, None, geometry, out=out, store=x.terms[0].x)
    assert_close(out, expected, 1e-12)
    assert_close(x.terms[0].x, values, 1e-14)


def test_values_that_were_kept_are_read(cpu_backend: Backend, rng: np.random.Generator) -> None:
    batch, geometry = AWKWARD["primes"]
    arrays = operands(rng, batch, geometry)
    x = deferred(rng, inputs(batch, geometry))
    x.array = arrays["x"]
    out, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
    cpu_backend.conv.forward(x, arrays["w"], None, geometry, out=out)
    REFERENCE.forward(arrays["x"], arrays["w"], None, geometry, out=expected)
    assert_close(out, expected, 1e-12)


def test_deferred_arrays_that_are_not_contiguous_give_the_same_result(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    batch, geometry = AWKWARD["primes"]
    arrays = operands(rng, batch, geometry)
    x = deferred(rng, inputs(batch, geometry))
    turned = Deferred(
        Term(np.asfortranarray(x.terms[0].x), *x.terms[0][1:]), shift=x.shift, relu=True
    )
    out, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
    cpu_backend.conv.forward(turned, arrays["w"], None, geometry, out=out)
    REFERENCE.forward(x, arrays["w"], None, geometry, out=expected)
    assert_close(out, expected, 1e-12)


def test_an_algorithm_that_does_not_suit_is_refused(cpu_backend: Backend) -> None:
    shape = geometry((8, 8), 3, 4, (3, 3), stride=2, padding=1)
    x, w = np.zeros((2, 8, 8, 3), np.float32), np.zeros((4, 3, 3, 3), np.float32)
    with pytest.raises(ValueError, match="winograd4"):
        cpu_backend.conv.forward(
            x, w, None, shape, out=np.empty((2, 4, 4, 4), np.float32), algorithm="winograd4"
        )

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
from tests.kernels.test_conv import (
    ALGORITHMS,
    AWKWARD,
    TOLERANCE,
    Arrays,
    Once,
    cast,
    geometry,
    operands,
    seeded,
)
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


def forward(case: str, dtype: Any) -> tuple[Deferred, Arrays, np.ndarray, dict[bool, np.ndarray]]:
    """Operands; the values of the input and, with and without ReLU, the output that is expected."""
    rng, (batch, geometry) = seeded(case), AWKWARD[case]
    arrays = cast(operands(rng, batch, geometry), dtype)
    x = deferred(rng, inputs(batch, geometry), dtype, terms=1 + len(case) % 2)
    exact, expected = cast_deferred(x, np.float64), {}
    for relu in (False, True):
        expected[relu] = np.empty(outputs(batch, geometry))
        REFERENCE.forward(exact, arrays["w"], arrays["b"], geometry, out=expected[relu], relu=relu)
    return x, arrays, Fused(np).values(exact), expected


@pytest.mark.few(50)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_forward_of_a_deferred_input_agrees_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    batch, geometry = AWKWARD[case]
    x, arrays, values, expected = once(forward, case, dtype)
    for relu in (False, True):
        y, store = empty(outputs(batch, geometry), dtype), empty(x.shape, dtype)
        sums = empty((1 + 2 * geometry.filters,))
        cpu_backend.conv.forward(
            *(x, arrays["w"], arrays["b"], geometry),
            out=y,
            relu=relu,
            store=store,
            sums=sums,
            algorithm=algorithm,
        )
        for array in (y, store, sums):
            assert_guards_hold(array)
        assert_close(y, expected[relu], TOLERANCE[dtype])
        assert_close(store, values, TOLERANCE[dtype])
        assert sums[0] == batch * np.prod(geometry.output)
        result = y.astype(np.float64)
        assert_sums_close(sums[1:].reshape(2, -1), [result, result], SUMS[dtype])


def backward_data(
    case: str, dtype: Any
) -> tuple[np.ndarray, Deferred, Deferred, np.ndarray, list[np.ndarray]]:
    """Operands; the gradient that is expected without and with what is added."""
    rng, (batch, geometry) = seeded(case), AWKWARD[case]
    w = operands(rng, batch, geometry)["w"].astype(dtype)
    shape, terms = inputs(batch, geometry), 1 + len(case) % 2
    dy = deferred(rng, outputs(batch, geometry), dtype, terms=2, relu=False)
    gate = deferred(rng, shape, dtype, terms=terms)
    away_from_zero(gate)
    exact_dy, exact_gate = cast_deferred(dy, np.float64), cast_deferred(gate, np.float64)
    more, expected = rng.standard_normal(shape).astype(dtype), [np.empty(shape), np.empty(shape)]
    for add, out in zip((None, more), expected, strict=True):
        REFERENCE.backward_data(exact_dy, w, geometry, out=out, add=add, gate=exact_gate)
    return w, dy, gate, more, expected


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_backward_of_data_through_a_gate_agrees_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    geometry = AWKWARD[case][1]
    w, dy, gate, more, expected = once(backward_data, case, dtype)
    centred = [t.x.astype(np.float64) - t.pivot for t in gate.terms]
    for added in ("nothing", "another array", "the output"):
        add = guarded(more) if added != "nothing" else None
        out = add if added == "the output" and add is not None else empty(more.shape, dtype)
        sums = empty((1 + len(gate.terms), geometry.channels))
        cpu_backend.conv.backward_data(
            *(dy, w, geometry), out=out, add=add, gate=gate, sums=sums, algorithm=algorithm
        )
        assert_guards_hold(out)
        assert_guards_hold(sums)
        assert_close(out, expected[add is not None], TOLERANCE[dtype])
        assert_sums_close(sums, [out.astype(np.float64), *centred], SUMS[dtype])


@pytest.mark.few(24)
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


def backward_filter(case: str, dtype: Any) -> tuple[Deferred, Deferred, np.ndarray]:
    """Operands, and the gradient that is expected."""
    rng, (batch, geometry) = seeded(case), AWKWARD[case]
    x = deferred(rng, inputs(batch, geometry), dtype)
    dy = deferred(rng, outputs(batch, geometry), dtype, terms=2, relu=False)
    expected, exact = (
        np.empty(geometry.weight_shape),
        [cast_deferred(v, np.float64) for v in (x, dy)],
    )
    REFERENCE.backward_filter(*exact, geometry, out=expected)
    return x, dy, expected


@pytest.mark.few(50)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_backward_of_filters_of_deferred_arrays_agrees_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str, dtype: Any
) -> None:
    geometry = AWKWARD[case][1]
    x, dy, expected = once(backward_filter, case, dtype)
    out = empty(geometry.weight_shape, dtype)
    for arrays in ((x, dy), (x, REFERENCE._values(dy)), (REFERENCE._values(x), dy)):
        cpu_backend.conv.backward_filter(*arrays, geometry, out=out, algorithm=algorithm)
        assert_guards_hold(out)
        assert_close(out, expected, TOLERANCE[dtype])


def both_gradients(case: str) -> tuple[Any, dict[bool, Any]]:
    """Operands; with and without a gate, the gradients and sums that are expected."""
    rng, (batch, geometry) = seeded(case), AWKWARD[case]
    w = operands(rng, batch, geometry)["w"]
    x = deferred(rng, inputs(batch, geometry), terms=1 + len(case) % 2)
    dy = deferred(rng, outputs(batch, geometry), terms=2, relu=False)
    add, before, expected = rng.standard_normal(x.shape), rng.standard_normal(w.shape), {}
    for gate in (x, None):
        options: dict[str, Any] = {"add": add, "gate": gate, "accumulate": gate is None}
        dx, dw, sums = np.empty(x.shape), before.copy(), np.empty((1 + len(x.terms), x.shape[-1]))
        REFERENCE.backward(x, dy, w, geometry, dx=dx, dw=dw, sums=sums, **options)
        expected[gate is not None] = dx, dw, sums
    return (x, dy, w, add, before), expected


@pytest.mark.few(25)
@pytest.mark.parametrize(("case", "algorithm"), ALGORITHMS)
def test_both_gradients_at_once_agree_with_the_reference(
    cpu_backend: Backend, once: Once, case: str, algorithm: str
) -> None:
    geometry = AWKWARD[case][1]
    (x, dy, w, more, before), expected = once(both_gradients, case)
    add, sums = guarded(more), empty((1 + len(x.terms), x.shape[-1]))
    for gate, out in ((x, empty(x.shape)), (None, empty(x.shape)), (x, add)):
        dx, dw, exact = expected[gate is not None]
        options: dict[str, Any] = {"add": add, "gate": gate, "accumulate": gate is None}
        filters = guarded(before)
        cpu_backend.conv.backward(
            *(x, dy, w, geometry), dx=out, dw=filters, sums=sums, algorithm=algorithm, **options
        )
        for array in (out, filters, sums):
            assert_guards_hold(array)
        assert_close(out, dx, 1e-12)
        assert_close(filters, dw, 1e-12)
        if gate is not None:
            assert_close(sums, exact, 1e-12)


POINTWISE = {
    "rows of large images": (2, geometry((24, 31), 24, 40, (1, 1))),
    "a few images to a block": (7, geometry((11, 13), 67, 35, (1, 1))),
    "more channels than filters read": (3, geometry((13, 13), 300, 16, (1, 1))),
    "too many filters": (2, geometry((13, 13), 16, 270, (1, 1))),
}


@pytest.mark.parametrize("case", POINTWISE)
def test_gradients_of_1x1_filters_are_the_same_if_they_share_a_copy_of_dy(
    cpu_backend: Backend, rng: np.random.Generator, case: str
) -> None:
    batch, shape = POINTWISE[case]
    w = operands(rng, batch, shape)["w"]
    x = deferred(rng, inputs(batch, shape))
    dy = deferred(rng, outputs(batch, shape), terms=2, relu=False)
    expected = np.empty(x.shape), np.empty(w.shape)
    REFERENCE.backward(x, dy, w, shape, dx=expected[0], dw=expected[1], gate=x)
    for threads in (1, 2):
        conv = create_backend("cpu", threads=threads, isa=cpu_backend.isa).conv
        alone, at_once = ([empty(x.shape), empty(w.shape)] for _ in range(2))
        conv.backward_data(dy, w, shape, out=alone[0], gate=x)
        conv.backward_filter(x, dy, shape, out=alone[1])
        conv.backward(x, dy, w, shape, dx=at_once[0], dw=at_once[1], gate=x)
        for own, other, exact in zip(alone, at_once, expected, strict=True):
            assert_guards_hold(other)
            assert own.tobytes() == other.tobytes()
            assert_close(other, exact, 1e-12)


@pytest.mark.few(50)
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

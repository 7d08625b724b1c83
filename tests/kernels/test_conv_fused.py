"""What compiled convolutions do in passing, against the reference, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.reference import ConvKernels
from tests.each import each
from tests.kernels.checks import with_threads
from tests.kernels.geometries import CASES, EVERY, geometry
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded
from tests.kernels.test_conv import TOLERANCE, Arrays, operands, seeded
from tests.kernels.test_conv import cast as cast_arrays
from tests.kernels.test_fused import away_from_zero, deferred
from tests.kernels.test_fused import cast as cast_deferred

REFERENCE = ConvKernels(np)

# Of the largest of the terms of a sum times their number. Up to 256 terms are added in their own
# type relative to the first of them; where that is the largest and most others are 0, their
# roundings all have one sign and add up.
SUMS = {np.float32: 4e-6, np.float64: 3e-14}


def assert_sums_close(value: np.ndarray, factors: list[np.ndarray], tolerance: float) -> None:
    """Assert that rows of `value` are sums of the first factor, alone and times each other one."""
    first = factors[0].reshape(-1, factors[0].shape[-1])
    for row, factor in zip(value, [np.ones_like(first), *factors[1:]], strict=True):
        terms = first * factor.reshape(first.shape)
        largest = np.abs(terms).max(axis=0, initial=0)
        # Along the last axis NumPy sums in pairs; along the first its own error is larger.
        total = np.ascontiguousarray(terms.T).sum(axis=1)
        assert (np.abs(row - total) <= tolerance * len(terms) * largest).all()


def empty(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """An array full of NaN, between guards."""
    return guarded(np.full(shape, np.nan, dtype))


def drawn(case: str, dtype: Any) -> dict[str, Any]:
    """Deferred arrays, filters and biases, and what is added to."""
    rng, (batch, shape) = seeded(case), CASES[case]
    arrays = cast_arrays(operands(rng, batch, shape), dtype)
    x = deferred(rng, arrays["x"].shape, dtype, terms=1 + len(case) % 2)
    away_from_zero(x)
    dy = deferred(rng, arrays["dy"].shape, dtype, terms=2, relu=False)
    add, before = (rng.standard_normal(size) for size in (x.shape, shape.weight_shape))
    return {**arrays, "add": add.astype(dtype), "before": before.astype(dtype), "x": x, "dy": dy}


def in_passing(conv: ConvKernels, a: dict[str, Any], shape: ConvGeometry, **options: Any) -> Arrays:
    """All that a convolution makes of deferred arrays, and besides its output."""
    x, w, b, dy, add, dtype = *(a[name] for name in ("x", "w", "b", "dy", "add")), a["w"].dtype
    y, plain = (empty(dy.shape, dtype) for _ in range(2))
    store, dx, alone, gated = (empty(x.shape, dtype) for _ in range(4))
    dw, dw_of_dy, dw_of_x, dw_alone = (empty(w.shape, a["before"].dtype) for _ in range(4))
    moments, sums, more = (
        empty((1 + 2 * shape.filters,)),
        *(empty((1 + len(x.terms), shape.channels)) for _ in range(2)),
    )
    conv.forward(x, w, b, shape, out=y, relu=True, store=store, sums=moments, **options)
    conv.forward(x, w, None, shape, out=plain, **options)
    conv.backward_data(dy, w, shape, out=dx, add=add, gate=x, sums=sums, **options)
    conv.backward_filter(x, dy, shape, out=dw, **options)
    conv.backward_filter(x, REFERENCE._values(dy), shape, out=dw_of_x, **options)
    conv.backward_filter(REFERENCE._values(x), dy, shape, out=dw_of_dy, **options)
    both = {"dx": guarded(add), "dw": guarded(a["before"])}  # which are added to
    given = {"accumulate": True, "add": both["dx"], "gate": x, "sums": more}
    conv.backward(x, dy, w, shape, **both, **given, **options)
    conv.backward(x, dy, w, shape, dx=alone, dw=dw_alone, **options)
    conv.backward(x, dy, w, shape, dx=gated, dw=dw_alone, gate=x, **options)
    results = {"y": y, "plain": plain, "store": store, "dx": dx, "alone": alone, "gated": gated}
    results |= {"dw": dw, "dw of dy": dw_of_dy, "dw of x": dw_of_x, "dw alone": dw_alone}
    results |= {"both dx": both["dx"], "both dw": both["dw"]}
    return results | {"moments": moments, "sums": sums, "more": more}


def expected(case: str, dtype: Any) -> tuple[dict[str, Any], Arrays]:
    """Operands, and what the reference makes of them in float64."""
    given = drawn(case, dtype)
    exact = {
        name: cast_deferred(a, np.float64) if isinstance(a, Deferred) else a.astype(np.float64)
        for name, a in given.items()
    }
    return given, in_passing(REFERENCE, exact, CASES[case][1])


@pytest.mark.covering(2)
@pytest.mark.few(18)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_deferred_arrays_and_sums_agree_with_the_reference(
    cpu_backend, once, case, algorithm, dtype
):
    given, exact = once(expected, case, dtype)
    (_, shape), x, b = CASES[case], given["x"], given["b"]
    found = in_passing(cpu_backend.conv, given, shape, algorithm=algorithm)
    for name, value in found.items():
        assert_guards_hold(value)
        if name not in ("moments", "sums", "more"):
            assert_close(value, exact[name], TOLERANCE[dtype], name)
    y, dx, both = (found[name].astype(np.float64) for name in ("y", "dx", "both dx"))
    assert found["moments"][0] == exact["moments"][0]
    assert_sums_close(found["moments"][1:].reshape(2, -1), [y, y], SUMS[dtype])
    centred = [term.x.astype(np.float64) - term.pivot for term in x.terms]
    assert_sums_close(found["sums"], [dx, *centred], SUMS[dtype])
    assert_sums_close(found["more"], [both, *centred], SUMS[dtype])
    over, y = cast_deferred(x, dtype), empty(given["dy"].shape, dtype)
    store = over.terms[0].x  # may be written though it is read
    cpu_backend.conv.forward(
        *(over, given["w"], b, shape), out=y, relu=True, store=store, algorithm=algorithm
    )
    assert_close(y, exact["y"], TOLERANCE[dtype])
    assert_close(store, exact["store"], TOLERANCE[dtype])


@pytest.mark.covering(1)
@pytest.mark.few(24)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_the_number_of_threads_does_not_change_a_byte(cpu_backend, once, case, algorithm):
    """Nor, with Winograd's algorithms, whether both gradients are computed at once."""
    given, (_, shape) = once(drawn, case, np.float32), CASES[case]
    results = [
        in_passing(with_threads(cpu_backend, threads).conv, given, shape, algorithm=algorithm)
        for threads in (1, 2, 5)
    ]
    first, *others = ({name: a.tobytes() for name, a in found.items()} for found in results)
    assert others == [first, first]
    if algorithm != "direct":
        assert first["both dx"] == first["dx"]
        assert first["dw alone"] == first["dw"]


@each("added", ["nothing", "another array", "the output"])
@each("gated", ["no gate", "kept values", "no ReLU"])
@each("case", ["primes", "stride 2", "depthwise", "three vectors of filters"])
def test_backward_of_data_does_what_it_is_told_to(cpu_backend, rng, case, gated, added):
    batch, shape = CASES[case]
    arrays = operands(rng, batch, shape)
    size = arrays["x"].shape
    add = None if added == "nothing" else rng.standard_normal(size)
    gate = None
    if gated != "no gate":
        gate = deferred(rng, size, terms=2, relu=gated == "kept values")
        gate.array = rng.standard_normal(size) if gated == "kept values" else None
    given = arrays["dy"], arrays["w"], shape
    exact = np.empty(size)
    REFERENCE.backward_data(*given, out=exact, add=add, gate=gate)
    out = add if added == "the output" and add is not None else empty(size)
    cpu_backend.conv.backward_data(*given, out=out, add=add, gate=gate)
    assert_close(out, exact, 1e-12)


POINTWISE = {
    "rows of large images": (2, geometry((24, 31), 24, 40, (1, 1))),
    "a few images to a block": (7, geometry((11, 13), 67, 35, (1, 1))),
    "more channels than filters read": (3, geometry((13, 13), 300, 16, (1, 1))),
    "too many filters": (2, geometry((13, 13), 16, 270, (1, 1))),
}


@each("case", POINTWISE)
def test_gradients_of_1x1_filters_are_the_same_if_they_share_a_copy_of_dy(cpu_backend, rng, case):
    batch, shape = POINTWISE[case]
    w, x = operands(rng, batch, shape)["w"], deferred(rng, (batch, *shape.size, shape.channels))
    dy = deferred(rng, (batch, *shape.output, shape.filters), terms=2, relu=False)
    exact = np.empty(x.shape), np.empty(w.shape)
    REFERENCE.backward(x, dy, w, shape, dx=exact[0], dw=exact[1], gate=x)
    for threads in (1, 2):
        conv = with_threads(cpu_backend, threads).conv
        dx, dw, *at_once = (empty(shape) for shape in (x.shape, w.shape) * 2)
        conv.backward_data(dy, w, shape, out=dx, gate=x)
        conv.backward_filter(x, dy, shape, out=dw)
        conv.backward(x, dy, w, shape, dx=at_once[0], dw=at_once[1], gate=x)
        for own, other, wanted in zip((dx, dw), at_once, exact, strict=True):
            assert_guards_hold(other)
            assert own.tobytes() == other.tobytes()
            assert_close(other, wanted, 1e-12)


@each("case", ["16 filters", "several images to a block", "pointwise"])
def test_statistics_are_right_when_the_mean_is_a_thousand_times_the_deviation(
    cpu_backend, rng, case
):
    batch, shape = CASES[case]
    arrays = cast_arrays(operands(rng, batch, shape), np.float32)
    y, sums = np.empty_like(arrays["dy"]), np.empty(1 + 2 * shape.filters)
    cpu_backend.conv.forward(arrays["x"], arrays["w"], None, shape, out=y)
    b = 1000 * y.std(axis=(0, 1, 2))
    cpu_backend.conv.forward(arrays["x"], arrays["w"], b, shape, out=y, sums=sums)
    count, total, squares = sums[0], *sums[1:].reshape(2, -1)
    exact = y.astype(np.float64)
    np.testing.assert_allclose(total / count, exact.mean(axis=(0, 1, 2)), rtol=1e-9)
    variance = squares / count - (total / count) ** 2
    np.testing.assert_allclose(variance, exact.var(axis=(0, 1, 2)), rtol=1e-4)


def test_values_that_were_kept_are_read(cpu_backend, rng):
    batch, shape = CASES["primes"]
    arrays = operands(rng, batch, shape)
    x = deferred(rng, arrays["x"].shape)
    x.array = arrays["x"]
    out, exact = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
    cpu_backend.conv.forward(x, arrays["w"], None, shape, out=out)
    REFERENCE.forward(arrays["x"], arrays["w"], None, shape, out=exact)
    assert_close(out, exact, 1e-12)

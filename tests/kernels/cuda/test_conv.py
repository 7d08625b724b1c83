"""Convolutions of the cuda backend on NumPy, with both engines, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.choices import Choices
from pydtnn.kernels.cuda import rows
from pydtnn.kernels.cuda.conv import REPEATS
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.reference import Conv as Reference
from pydtnn.kernels.reference import Fused
from tests.kernels.cuda.on_host import conv
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import AWKWARD, DIRECTIONS, operands, run
from tests.kernels.test_fused import deferred

REFERENCE = Reference(np)
CONV = conv()
ALGORITHMS = ("rows", "implicit gemm")
TOLERANCE = 1e-12  # float64, in norm

both = pytest.mark.parametrize("algorithm", ALGORITHMS)
every = pytest.mark.parametrize("case", AWKWARD)


@both
@every
def test_all_directions_agree_with_the_reference(
    rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    for direction in DIRECTIONS:
        expected = run(REFERENCE, direction, arrays, geometry)
        value = run(CONV, direction, arrays, geometry, algorithm=algorithm)
        assert_close(value, expected, TOLERANCE)


@every
def test_rows_that_do_not_fit_the_buffer_are_made_in_portions(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(rows, "BUFFER_BYTES", 1)
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    for direction in DIRECTIONS:
        expected = run(REFERENCE, direction, arrays, geometry)
        assert_close(run(CONV, direction, arrays, geometry, algorithm="rows"), expected, TOLERANCE)


@both
@every
def test_a_deferred_input_is_evaluated_and_stored(
    rng: np.random.Generator, case: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    x = deferred(rng, arrays["x"].shape, terms=1 + len(case) % 2)
    exact = Fused(np).values(x)
    for relu in (False, True):
        y, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
        sums = np.full((1 + 2 * geometry.filters,), np.nan)
        expected_sums = sums.copy()
        store = np.full_like(arrays["x"], np.nan)
        w, b = arrays["w"], arrays["b"]
        CONV.forward(
            x, w, b, geometry, out=y, relu=relu, store=store, sums=sums, algorithm=algorithm
        )
        REFERENCE.forward(exact, w, b, geometry, out=expected, relu=relu, sums=expected_sums)
        assert_close(y, expected, TOLERANCE)
        assert_close(sums, expected_sums, TOLERANCE)
        if batch:
            np.testing.assert_array_equal(store, exact)


@pytest.mark.parametrize("kept", [False, True])
def test_values_that_a_deferred_input_keeps_are_taken(rng: np.random.Generator, kept: bool) -> None:
    batch, geometry = AWKWARD["primes"]
    arrays = operands(rng, batch, geometry)
    x = deferred(rng, arrays["x"].shape)
    x.array = arrays["x"] if kept else None
    y, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
    CONV.forward(x, arrays["w"], None, geometry, out=y)
    REFERENCE.forward(x, arrays["w"], None, geometry, out=expected)
    assert_close(y, expected, TOLERANCE)


def test_the_store_may_be_the_array_of_a_term(rng: np.random.Generator) -> None:
    batch, geometry = AWKWARD["16 filters"]
    arrays = operands(rng, batch, geometry)
    x = deferred(rng, arrays["x"].shape)
    exact, y = Fused(np).values(x), np.empty_like(arrays["dy"])
    CONV.forward(x, arrays["w"], None, geometry, out=y, store=x.terms[0].x)
    np.testing.assert_array_equal(x.terms[0].x, exact)
    assert_close(y, run_forward(exact, arrays["w"], geometry, y), TOLERANCE)


def run_forward(x: np.ndarray, w: np.ndarray, geometry: Any, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    REFERENCE.forward(x, w, None, geometry, out=out)
    return out


@both
@pytest.mark.parametrize("gated", ["no gate", "a gate", "a gate without a ReLU", "kept values"])
@pytest.mark.parametrize("added", ["nothing", "another array", "the output"])
@pytest.mark.parametrize("case", ["primes", "stride 2", "three groups", "depthwise", "no image"])
def test_both_gradients_do_what_they_are_told_to(
    rng: np.random.Generator, case: str, added: str, gated: str, algorithm: str
) -> None:
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    x: Any = arrays["x"]
    gate = sums = expected_sums = None
    if gated != "no gate":
        x = gate = deferred(rng, x.shape, terms=2, relu=gated != "a gate without a ReLU")
        gate.array = arrays["x"] if gated == "kept values" else None
        sums, expected_sums = np.empty((3, geometry.channels)), np.empty((3, geometry.channels))
    dy = deferred(rng, arrays["dy"].shape, terms=2, relu=False)
    more = rng.standard_normal(arrays["x"].shape) if added != "nothing" else None
    dw = rng.standard_normal(geometry.weight_shape)
    expected_dw, expected_dx = dw.copy(), np.empty_like(arrays["x"])
    dx = more.copy() if added == "the output" and more is not None else np.empty_like(expected_dx)
    given: dict[str, Any] = {"accumulate": True, "gate": gate}
    REFERENCE.backward(
        *(x, dy, arrays["w"], geometry),
        **given,
        **{"dx": expected_dx, "dw": expected_dw, "add": more, "sums": expected_sums},
    )
    CONV.backward(
        *(x, dy, arrays["w"], geometry),
        **given,
        **{"dx": dx, "dw": dw, "add": dx if added == "the output" else more, "sums": sums},
        algorithm=algorithm,
    )
    assert_close(dx, expected_dx, TOLERANCE)
    assert_close(dw, expected_dw, TOLERANCE)
    if sums is not None and expected_sums is not None:
        assert_close(sums, expected_sums, TOLERANCE)


def test_arrays_that_are_not_contiguous_give_the_same_result(rng: np.random.Generator) -> None:
    batch, geometry = AWKWARD["primes"]
    arrays = operands(rng, batch, geometry)
    fortran = {name: np.asfortranarray(array) for name, array in arrays.items()}
    out = np.asfortranarray(np.empty_like(arrays["dy"]))
    expected = run(REFERENCE, "forward", arrays, geometry)
    for y in (out, np.empty_like(arrays["dy"])):
        CONV.forward(fortran["x"], fortran["w"], fortran["b"], geometry, out=y)
        assert_close(y, expected, TOLERANCE)


def test_an_algorithm_that_does_not_suit_is_refused_with_those_that_do(
    rng: np.random.Generator,
) -> None:
    batch, geometry = AWKWARD["16 filters"]
    arrays = operands(rng, batch, geometry)
    with pytest.raises(ValueError, match="fft does not suit 3x3 .* implicit gemm, winograd, rows"):
        run(CONV, "forward", arrays, geometry, algorithm="fft")


def test_candidates_are_measured_without_touching_what_is_added_to(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, geometry = AWKWARD["16 filters"]
    arrays = operands(rng, batch, geometry)
    choices = Choices("measure")
    measured: list[str] = []

    def pick(*key: Any) -> str:
        *_, candidates, measure = key
        for name in candidates:
            measure(name)
            measured.append(name)
        return "rows"

    monkeypatch.setattr(choices, "pick", pick)
    dw = rng.standard_normal(geometry.weight_shape)
    before = dw.copy()
    conv(choices).backward_filter(arrays["x"], arrays["dy"], geometry, out=dw, accumulate=True)
    assert measured == ["implicit gemm", "winograd", "rows"]
    expected = before + run(REFERENCE, "backward_filter", arrays, geometry)
    assert_close(dw, expected, TOLERANCE)
    assert REPEATS > 1


def test_a_batch_that_is_empty_gives_no_gradient(rng: np.random.Generator) -> None:
    _, geometry = AWKWARD["primes"]
    arrays = operands(rng, 0, geometry)
    dw = np.ones(geometry.weight_shape)
    CONV.backward_filter(arrays["x"], arrays["dy"], geometry, out=dw, accumulate=True)
    assert (dw == 1).all()
    CONV.backward_filter(Deferred.of(arrays["x"], None), arrays["dy"], geometry, out=dw)
    assert not dw.any()

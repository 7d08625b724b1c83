"""Convolutions of the cuda backend on NumPy, with both engines, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.autotuner import Autotuner, AutotunerFile
from pydtnn.kernels.cuda import rows
from pydtnn.kernels.cuda.engine import Refused
from pydtnn.kernels.deferred import Deferred
from pydtnn.kernels.reference import ConvKernels, FusedKernels
from tests.each import each
from tests.kernels.geometries import AWKWARD
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import DIRECTIONS, operands, run
from tests.kernels.test_conv_fused import drawn, in_passing
from tests.kernels.test_fused import deferred
from tests.simulated.host import conv

REFERENCE = ConvKernels(np)
CONV = conv()
ALGORITHMS = ("rows", "implicit gemm")
TOLERANCE = 1e-12  # float64, in norm
Primes = tuple[int, ConvGeometry, Any]


@pytest.fixture
def primes(rng: np.random.Generator) -> Primes:
    batch, geometry = AWKWARD["primes"]
    return batch, geometry, operands(rng, batch, geometry)


both = pytest.mark.parametrize("algorithm", ALGORITHMS)
every = pytest.mark.parametrize("case", AWKWARD)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "rows in portions"])
@every
def test_all_directions_agree_with_the_reference(rng, monkeypatch, case, algorithm):
    if "portions" in algorithm:
        monkeypatch.setattr(rows, "BUFFER_BYTES", 1)
    batch, geometry = AWKWARD[case]
    arrays = operands(rng, batch, geometry)
    for direction in DIRECTIONS:
        expected = run(REFERENCE, direction, arrays, geometry)
        value = run(CONV, direction, arrays, geometry, algorithm=algorithm.split(" in ")[0])
        assert_close(value, expected, TOLERANCE)


@each("algorithm", ALGORITHMS)
@each(
    "case",
    ["primes", "stride 2", "three groups", "depthwise", "no image", "16 filters", "pointwise"]
    + [
        "dilation 2, stride 3",
        "even kernel",
        "one axis",
        "three axes",
        "padding beyond the kernel",
    ],
)
def test_deferred_arrays_and_sums_agree_with_the_reference(case, algorithm):
    given, shape = drawn(case, np.float64), AWKWARD[case][1]
    exact = in_passing(REFERENCE, given, shape)
    found = in_passing(CONV, given, shape, algorithm=algorithm)
    for name, value in found.items():
        if name != "store" or AWKWARD[case][0]:
            assert_close(value, exact[name], TOLERANCE, name)


def test_kept_values_are_taken_and_the_store_may_be_the_array_of_a_term(rng, primes):
    _batch, geometry, arrays = primes
    y, expected, w = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"]), arrays["w"]
    for kept in (None, arrays["x"]):
        x = deferred(rng, arrays["x"].shape)
        x.array = kept
        exact = FusedKernels(np).values(x) if kept is None else kept
        store = {"store": x.terms[0].x} if kept is None else {}
        CONV.forward(x, w, None, geometry, out=y, **store)
        REFERENCE.forward(exact, w, None, geometry, out=expected)
        assert_close(y, expected, TOLERANCE)
        for array in store.values():
            np.testing.assert_array_equal(array, exact)


def test_an_algorithm_that_does_not_suit_is_refused_with_those_that_do(rng):
    batch, geometry = AWKWARD["16 filters"]
    arrays = operands(rng, batch, geometry)
    with pytest.raises(ValueError, match="fft does not suit 3x3 .* implicit gemm, winograd, rows"):
        run(CONV, "forward", arrays, geometry, algorithm="fft")


def test_candidates_are_measured_without_touching_what_is_added_to(rng, monkeypatch):
    batch, geometry = AWKWARD["16 filters"]
    arrays = operands(rng, batch, geometry)
    autotuner = Autotuner("measure")
    measured: list[str] = []

    def pick(*key: Any) -> str:
        *_, candidates, measure = key
        for name in candidates:
            measure(name)
            measured.append(name)
        return "rows"

    monkeypatch.setattr(autotuner, "pick", pick)
    dw = rng.standard_normal(geometry.weight_shape)
    before = dw.copy()
    conv(autotuner).backward_filter(arrays["x"], arrays["dy"], geometry, out=dw, accumulate=True)
    assert measured == ["implicit gemm", "winograd", "rows"]
    expected = before + run(REFERENCE, "backward_filter", arrays, geometry)
    assert_close(dw, expected, TOLERANCE)


def test_a_batch_that_is_empty_gives_no_gradient(rng):
    _, geometry = AWKWARD["primes"]
    arrays = operands(rng, 0, geometry)
    dw = np.ones(geometry.weight_shape)
    CONV.backward_filter(arrays["x"], arrays["dy"], geometry, out=dw, accumulate=True)
    assert (dw == 1).all()
    CONV.backward_filter(Deferred.of(arrays["x"], None), arrays["dy"], geometry, out=dw)
    assert not dw.any()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is measured be kept where nobody else looks."""
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))


class Moody:
    """An engine that fails in one way whenever it is used."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def candidates(self, *key: Any) -> tuple[str, ...]:
        return ("best", "next best")

    def run(self, *arguments: Any, **options: Any) -> None:
        raise self.error


def with_moody(error: Exception, autotuner: Autotuner) -> Any:
    family = conv(autotuner)
    family.engines = (Moody(error), *family.engines)
    return family


@each("direction", DIRECTIONS)
@each("mode", ["direct", "fixed", "measure"])
def test_what_an_engine_refuses_another_one_does_and_the_report_says_so(
    primes, direction, mode, own_cache
):
    batch, geometry, arrays = primes
    autotuner = Autotuner(mode, file=AutotunerFile("a GPU"))
    family = with_moody(Refused("not today"), autotuner)
    expected = run(REFERENCE, direction, arrays, geometry)
    for _ in range(2):
        assert_close(run(family, direction, arrays, geometry), expected, TOLERANCE)
    what = f"conv.{direction} {geometry} float64, batch {batch}"
    report = autotuner.report()
    assert report[f"{what}, without best"] == "refused: not today"
    assert report[f"{what}, without next best"] == "refused: not today"
    assert report[what].split(",")[0] in ("implicit gemm", "winograd", "rows")
    assert "best" not in family.algorithms(direction, geometry, batch, arrays["x"].dtype)


def test_what_lacks_memory_is_left_out_but_not_what_was_asked_for_or_is_broken(primes, own_cache):
    _batch, geometry, arrays = primes
    autotuner, direct = Autotuner("measure", file=AutotunerFile("a GPU")), Autotuner("direct")
    run(with_moody(MemoryError("1 GiB"), autotuner), "forward", arrays, geometry)
    assert "refused: 1 GiB" in autotuner.report().values()
    asked = with_moody(Refused("not today"), direct)
    with pytest.raises(Refused, match="not today"):
        run(asked, "forward", arrays, geometry, algorithm="best")
    with pytest.raises(RuntimeError, match="broken"):
        run(with_moody(RuntimeError("broken"), direct), "forward", arrays, geometry)


class Fast:
    """An engine that does what follows in passing, or refuses to."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.calls = 0

    def passes(self, *key: Any) -> bool:
        return True

    def run_passing(
        self, x: Any, w: Any, geometry: Any, *, out: Any, shift: Any, relu: bool, sums: Any
    ) -> None:
        self.calls += 1
        if self.refuses:
            raise Refused("not today")
        REFERENCE.forward(x, w, shift, geometry, out=out, relu=relu, sums=sums)


@each("refuses", [False, True])
@each("chosen", ["apart", "in passing"])
@each("after", [("b",), ("relu",), ("b", "relu", "sums"), ("sums",)])
def test_what_follows_forward_is_done_in_passing_where_that_is_chosen(
    primes, monkeypatch, after, chosen, refuses
):
    batch, geometry, arrays = primes
    autotuner, family = Autotuner("measure"), conv()
    family.autotuner, family.passing = autotuner, Fast(refuses=refuses)
    picked: list[str] = []

    def pick(operation: str, *key: Any) -> str:
        candidates = key[3]
        picked.append(operation)
        return chosen if chosen in candidates else candidates[0]

    monkeypatch.setattr(autotuner, "pick", pick)
    results = []
    for convolution in (family, REFERENCE):
        y, sums = np.empty_like(arrays["dy"]), np.full(1 + 2 * geometry.filters, np.nan)
        convolution.forward(
            *(arrays["x"], arrays["w"], arrays["b"] if "b" in after else None, geometry),
            **{"out": y, "relu": "relu" in after, "sums": sums if "sums" in after else None},
        )
        results.append((y, sums[np.isfinite(sums)]))
    for value, expected in zip(*results, strict=True):
        assert_close(value, expected, TOLERANCE)
    assert family.passing.calls == (chosen == "in passing")
    words = ", ".join(
        name for name in ("shift", "relu", "sums") if name.replace("shift", "b") in after
    )
    assert picked[0] == f"forward with {words}"
    dropped = f"conv.forward with {words} {geometry} float64, batch {batch}, without in passing"
    assert (dropped in autotuner.report()) == (refuses and chosen == "in passing")


@pytest.mark.parametrize("chosen", ["apart", "in passing"])
def test_sums_are_left_to_the_norm_where_nothing_takes_them_in_passing(rng, monkeypatch, chosen):
    batch, geometry = AWKWARD["primes"]
    arrays, autotuner, family = operands(rng, batch, geometry), Autotuner("measure"), conv()

    def takes(*, bias: bool) -> bool:
        return family.takes_sums(geometry, batch, arrays["x"].dtype, bias=bias, relu=False)

    assert not takes(bias=False)
    assert not takes(bias=True)
    family = conv()
    family.autotuner, family.passing = autotuner, Fast(refuses=False)
    assert takes(bias=False), "which has yet to be found out"
    monkeypatch.setattr(autotuner, "_choose", lambda *_: (chosen, "for this test"))
    y, sums = np.empty_like(arrays["dy"]), np.empty(1 + 2 * geometry.filters)
    family.forward(arrays["x"], arrays["w"], None, geometry, out=y, sums=sums)
    assert takes(bias=False) == (chosen == "in passing")
    assert takes(bias=True), "or another way might round the bias elsewhere"

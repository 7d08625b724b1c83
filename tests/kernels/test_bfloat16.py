"""Compiled convolutions of bfloat16 on awkward sizes, and conversions.

`test_every_kernel.py` has cases of every kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, Deferred
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.kernels.cpu.isa import PAIRING
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import ConvKernels
from tests.each import each
from tests.kernels.checks import with_threads
from tests.kernels.geometries import AWKWARD, LINES, PARTS, SIZES
from tests.kernels.guarded import assert_guards_hold, guarded
from tests.kernels.test_conv import DIRECTIONS, Arrays, directions, operands, run, seeded
from tests.kernels.test_conv_fused import drawn, in_passing
from tests.kernels.test_fused import cast

pytestmark = pytest.mark.emulated

HALF = np.dtype("bfloat16")
UNIT = 2.0**-8
"""Largest relative error of rounding."""

PAIRS = {"winograd2": 2, "winograd24": 3}
"""Error in norm of Winograd's algorithms with products of bfloat16, in units of rounding.

1.0 to 1.3 and 1.5 to 2.0 measured: each factor is rounded, and transforms add errors up. That of
the result only is 0.43.
"""

REFERENCE = ConvKernels(np)
ALGORITHMS = ("winograd4", "winograd2")
CASES = AWKWARD | SIZES | LINES | PARTS
EVERY = [(case, name) for case, (_, shape) in AWKWARD.items() for name in candidates(shape, True)]
EVERY += [(case, name) for case in SIZES for name in (*ALGORITHMS, "winograd24")]
EVERY += [(case, candidates(shape)[1]) for case, (_, shape) in (LINES | PARTS).items()]


def halves(arrays: Arrays) -> Arrays:
    """Operands of a convolution: activations and filters of 16 bits, biases of 32."""
    return {n: array.astype(arithmetic(HALF) if n == "b" else HALF) for n, array in arrays.items()}


def in_halves(case: str) -> tuple[int, ConvGeometry, Arrays, Arrays]:
    """A batch and geometry, operands, and what is expected of them."""
    batch, shape = CASES[case]
    arrays = halves(operands(seeded(case), batch, shape))
    return batch, shape, arrays, directions(arrays, shape)


def run_halves(backend: Backend, direction: str, arrays: Arrays, *args: Any, **options: Any) -> Any:
    """As `run`; the gradient of filters is float32."""
    if direction != "backward_filter":
        return run(backend.conv, direction, arrays, *args, **options)
    x, dy = guarded(arrays["x"]), guarded(arrays["dy"])
    dw = guarded(np.full(arrays["w"].shape, np.nan, "float32"))
    backend.conv.backward_filter(x, dy, *args, out=dw, **options)
    assert_guards_hold(dw)
    return dw


def assert_rounded(value: np.ndarray, exact: np.ndarray, rest: float = 2e-5) -> None:
    """Check that values are rounded, if at all, from some that are off by at most `rest`.

    That is relative to the largest.
    """
    allowed = rest * np.abs(exact).max(initial=0)
    if value.dtype == HALF:
        allowed = allowed + UNIT * np.abs(exact)
    assert (np.abs(value.astype("float64") - exact) <= allowed).all()


def skip_without_pairs(backend: Backend, algorithm: str) -> None:
    if algorithm == "winograd24" and backend.isa not in PAIRING:
        pytest.skip("F(2x4) has products of pairs only")


def norm_error(value: np.ndarray, exact: np.ndarray) -> float:
    """Error in norm, in units of rounding."""
    error = np.linalg.norm(value.astype("float64") - exact)
    return float(error / max(np.linalg.norm(exact), 1e-300) / UNIT)


@pytest.mark.few(18)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_convolutions_agree_with_the_reference(cpu_backend, once, case, algorithm):
    skip_without_pairs(cpu_backend, algorithm)
    _, shape, arrays, expected = once(in_halves, case)
    for direction in DIRECTIONS:
        value = run_halves(cpu_backend, direction, arrays, shape, algorithm=algorithm)
        if algorithm in PAIRS and cpu_backend.isa in PAIRING:
            assert norm_error(value, expected[direction]) < PAIRS[algorithm]
        else:
            assert_rounded(
                value,
                expected[direction],
                1e-4 if algorithm in ("winograd4", "winograd5") else 2e-5,
            )


def in_passing_halves(case: str) -> tuple[Arrays, Arrays]:
    """Operands, biases and gradients of filters of 32 bits, and what is expected of them."""
    given = {
        name: in_16_bits(a) if isinstance(a, Deferred) else a.astype(HALF)
        for name, a in drawn(case, np.float64).items()
    }
    given |= {name: given[name].astype(arithmetic(HALF)) for name in ("b", "before")}
    exact = {
        name: cast(a, np.float64) if isinstance(a, Deferred) else a.astype(np.float64)
        for name, a in given.items()
    }
    return given, in_passing(REFERENCE, exact, CASES[case][1])


@pytest.mark.few(8)
@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_deferred_arrays_and_sums_agree_with_the_reference_for_all_threads(
    cpu_backend, once, case, algorithm
):
    skip_without_pairs(cpu_backend, algorithm)
    (given, exact), (_, shape) = once(in_passing_halves, case), CASES[case]
    found, other = (
        in_passing(with_threads(cpu_backend, threads).conv, given, shape, algorithm=algorithm)
        for threads in (1, 3)
    )
    for name, value in found.items():
        assert value.tobytes() == other[name].tobytes(), name
        if name not in ("moments", "sums", "more"):
            assert norm_error(value, exact[name]) < PAIRS.get(algorithm, 1), name
    # of what was stored, not of what it was rounded from
    rows = found["y"].reshape(-1, shape.filters).astype("float64")
    want = np.concatenate([[len(rows)], rows.sum(axis=0), (rows * rows).sum(axis=0)])
    most = np.abs(rows).sum(axis=0).max(initial=0)
    np.testing.assert_allclose(found["moments"], want, rtol=1e-4, atol=1e-4 * most)


@each("n", [0, 1, 15, 16, 17, 100_003])
def test_conversions_round_to_nearest_even_and_subnormal_numbers_to_zero(cpu_backend, n):
    rng = np.random.default_rng(n)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)
    bits[: n // 2] &= 0xFFFF8000  # ties, and infinities among them
    x = bits.view(np.float32)
    out, back = np.empty(n, HALF), np.empty(n, np.float32)
    cpu_backend.elementwise.convert(x, out=out)
    subnormal = np.abs(x) < np.finfo(x.dtype).tiny
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.where(subnormal, np.copysign(np.float32(0), x), x).astype(HALF)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(x))
    known = ~np.isnan(x)
    np.testing.assert_array_equal(out.view(np.uint16)[known], want.view(np.uint16)[known])
    cpu_backend.elementwise.convert(out, out=back)
    np.testing.assert_array_equal(back[known], out.astype(np.float32)[known])


def in_16_bits(value: Any) -> Any:
    """A deferred array whose arrays have 16 bits and its coefficients 32."""
    single = arithmetic(HALF)

    def to(array: Any, dtype: Any) -> Any:
        return None if array is None else array.astype(dtype)

    terms = (
        type(term)(to(term.x, HALF), to(term.pivot, single), to(term.factor, single))
        for term in value.terms
    )
    return type(value)(*terms, shift=to(value.shift, single), relu=value.relu)

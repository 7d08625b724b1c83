"""Compiled kernels of deferred arrays against the reference, on every instruction set."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.cpu.fused import Fused
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.reference import Fused as Reference
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = Reference(np)

# Rows and channels: none, narrower than half a vector and folded or not, whole vectors of every
# width, tails, rows of one span and of several, more rows than a chunk has.
SHAPES = [
    (0, 5),
    (1, 1),
    (3, 2),
    (700, 1),
    (301, 3),
    (77, 7),
    (130, 8),
    (600, 16),
    (37, 19),
    (65, 64),
    (9, 101),
    (33, 640),
    (6, 1100),
]

BOUNDS = [(False, inf), (True, inf), (True, 0.5)]
"""ReLU or not, and its limit."""

# Of the values' norm. A value is a sum of two products; float32 sums over a chunk of 256 rows of
# both signs lose a few last places of their largest partial sum.
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-14}

DTYPES = [np.float32, np.float64]


def deferred(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: Any = np.float64,
    *,
    terms: int = 1,
    plain: bool = False,
    relu: bool = True,
    limit: float = inf,
) -> Deferred:
    """A deferred array between guards; `plain`: the last term has neither pivot nor factor."""

    def random(*shape: int) -> np.ndarray:
        return guarded(rng.standard_normal(shape).astype(dtype))

    channels = shape[-1]
    parts = [Term(random(*shape), random(channels), random(channels)) for _ in range(terms)]
    if plain:
        parts[-1] = Term(random(*shape))
    shift = None if plain else random(channels)
    return Deferred(*parts, shift=shift, relu=relu, limit=limit)


def cast(value: Deferred, dtype: Any) -> Deferred:
    """The same in another type."""
    terms = [Term(*(None if a is None else a.astype(dtype) for a in t)) for t in value.terms]
    shift = None if value.shift is None else value.shift.astype(dtype)
    return value.of_terms(*terms, shift=shift)


def away_from_zero(value: Deferred) -> None:
    """Move the values off the corners of ReLU, where rounding decides on which side they lie."""
    linear = Deferred(*value.terms, shift=value.shift)
    values = REFERENCE.values(cast(linear, np.float64))
    near = (np.abs(values) < 1e-3) | (np.abs(values - value.limit) < 1e-3)
    value.terms[0].x[near] += 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_agree_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, shape: tuple[int, int], terms: int, dtype: Any
) -> None:
    for plain in (False, True):
        for relu, limit in BOUNDS:
            value = deferred(rng, shape, dtype, terms=terms, plain=plain, relu=relu, limit=limit)
            out = guarded(np.full(shape, np.nan, dtype))
            cpu_backend.fused.evaluate(value, out=out)
            assert_guards_hold(out)
            assert_close(out, REFERENCE.values(cast(value, np.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_may_overwrite_a_term(
    cpu_backend: Backend, rng: np.random.Generator, shape: tuple[int, int]
) -> None:
    for k in (0, 1):
        value = deferred(rng, shape, terms=2)
        expected = REFERENCE.values(value)
        cpu_backend.fused.evaluate(value, out=value.terms[k].x)
        assert_close(value.terms[k].x, expected, 1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_agree_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, shape: tuple[int, int], terms: int, dtype: Any
) -> None:
    for relu, limit in BOUNDS:
        for added in (False, True):
            for summed in (False, True):
                value = deferred(
                    rng, shape, dtype, terms=terms, plain=added, relu=relu, limit=limit
                )
                away_from_zero(value)
                dy, add = (guarded(rng.standard_normal(shape).astype(dtype)) for _ in range(2))
                out = guarded(np.full(shape, np.nan, dtype))
                sums = guarded(np.full((1 + terms, shape[1]), np.nan))
                expected, exact = np.empty(shape), np.empty_like(sums)
                options = {"add": add if added else None}
                cpu_backend.fused.gate(dy, value, out=out, sums=sums if summed else None, **options)
                REFERENCE.gate(dy, cast(value, np.float64), out=expected, sums=exact, **options)
                assert_guards_hold(out)
                assert_guards_hold(sums)
                assert_close(out, expected, TOLERANCE[dtype])
                if summed:
                    # A sum may be far smaller than its terms: in units of their norm.
                    size = TOLERANCE[dtype] * np.sqrt(max(shape[0], 1)) * 10
                    np.testing.assert_allclose(sums, exact, rtol=0, atol=size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_may_overwrite_what_they_read(
    cpu_backend: Backend, rng: np.random.Generator, shape: tuple[int, int]
) -> None:
    value = deferred(rng, shape, terms=2)
    dy, add, expected = rng.standard_normal(shape), rng.standard_normal(shape), np.empty(shape)
    REFERENCE.gate(dy, value, out=expected, add=add)
    for target in (0, 1):
        arrays = [dy.copy(), add.copy()]
        cpu_backend.fused.gate(arrays[0], value, out=arrays[target], add=arrays[1])
        assert_close(arrays[target], expected, 1e-14)


def test_a_gate_follows_the_values_that_were_kept(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    value = deferred(rng, (50, 20), terms=2)
    value.array = rng.standard_normal((50, 20))
    dy, out = rng.standard_normal((50, 20)), np.empty((50, 20))
    cpu_backend.fused.gate(dy, value, out=out)
    np.testing.assert_array_equal(out, dy * (value.array > 0))


def test_nan_passes_through(cpu_backend: Backend, rng: np.random.Generator) -> None:
    value = deferred(rng, (9, 5), plain=True)
    value.terms[0].x[4, 2] = np.nan
    out = np.empty((9, 5))
    cpu_backend.fused.evaluate(value, out=out)
    assert np.isnan(out[4, 2])
    assert np.isnan(out).sum() == 1


def check_gate_beside_nan(backend: Backend, terms: int, kept: bool) -> None:
    rng, shape = np.random.default_rng(0), (40, 21)
    x, dy = rng.normal(size=(terms, *shape)), rng.normal(size=shape)
    x[0, :10] = np.nan
    dy[::2] = rng.choice([np.nan, np.inf, -np.inf], size=(20, 21))
    value = Deferred(*(Term(backend.asarray(part)) for part in x), relu=True)
    if kept:
        value.array = backend.fused.values(value)
    out = backend.empty(shape, "float64")
    backend.fused.gate(backend.asarray(dy), value, out=out)
    expected = np.where(x.sum(axis=0) <= 0, 0, dy)
    np.testing.assert_array_equal(backend.to_numpy(out), expected)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_a_gate_stops_what_is_not_finite_and_passes_all_where_the_value_is_nan(
    backend: Backend, terms: int, kept: bool
) -> None:
    check_gate_beside_nan(backend, terms, kept)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_so_does_that_of_every_instruction_set(
    cpu_backend: Backend, terms: int, kept: bool
) -> None:
    check_gate_beside_nan(cpu_backend, terms, kept)


@pytest.mark.parametrize("shape", [(3001, 3), (5000, 16), (300, 200)], ids=str)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, shape: tuple[int, int]
) -> None:
    value = deferred(rng, shape, np.float32, terms=2)
    dy = rng.standard_normal(shape).astype(np.float32)
    results = []
    for threads in (1, 2):
        fused = create_backend("cpu", threads=threads, isa=cpu_backend.isa).fused
        out, gated, sums = np.empty_like(dy), np.empty_like(dy), np.empty((3, shape[1]))
        fused.evaluate(value, out=out)
        fused.gate(dy, value, out=gated, sums=sums)
        results.append([array.tobytes() for array in (out, gated, sums)])
    assert results[0] == results[1]


def test_arrays_that_are_not_contiguous_give_the_same_result(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    value = deferred(rng, (40, 12), terms=2)
    turned = Deferred(
        Term(np.asfortranarray(value.terms[0].x), *value.terms[0][1:]),
        value.terms[1],
        shift=value.shift,
        relu=True,
    )
    dy, sums = rng.standard_normal((40, 12)), np.empty((3, 12))
    out, expected = np.empty((40, 12)), np.empty((40, 12))
    cpu_backend.fused.evaluate(turned, out=out)
    assert_close(out, REFERENCE.values(value), 1e-14)
    cpu_backend.fused.gate(dy, turned, out=out, sums=sums)
    REFERENCE.gate(dy, value, out=expected)
    assert_close(out, expected, 1e-14)


@pytest.mark.parametrize("terms", [1, 2])
def test_values_may_be_rows_of_a_larger_array(
    cpu_backend: Backend, rng: np.random.Generator, terms: int
) -> None:
    shape = 3, 5, 4, 7
    value = deferred(rng, (60, 7), terms=terms, relu=True)
    terms_ = [Term(x.reshape(shape), pivot, factor) for x, pivot, factor in value.terms]
    wide = np.full((3, 8, 4, 7), np.nan)
    value = Deferred(*terms_, shift=value.shift, relu=True)
    cpu_backend.fused.evaluate(value, out=wide[:, 2:7])
    np.testing.assert_array_equal(wide[:, 2:7], cpu_backend.fused.values(value))
    assert np.isnan(wide[:, :2]).all()
    assert np.isnan(wide[:, 7:]).all()


def test_coefficients_of_the_wrong_length_are_refused(cpu_backend: Backend) -> None:
    value = Deferred(Term(np.ones((4, 3)), np.ones(2)))
    with pytest.raises(ValueError, match="elements"):
        cpu_backend.fused.evaluate(value, out=np.empty((4, 3)))


def test_hot_kernels_are_compiled(cpu_backend: Backend) -> None:
    assert isinstance(cpu_backend.fused, Fused)
    for kernel in ("evaluate", "gate"):
        assert getattr(Fused, kernel) is not getattr(Reference, kernel)

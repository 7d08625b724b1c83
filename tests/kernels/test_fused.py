"""Compiled kernels of deferred arrays against the reference, on every instruction set."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.reference import FusedKernels
from tests.each import each
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = FusedKernels(np)

# Rows and channels: none, narrower than half a vector and folded or not, whole vectors of every
# width, tails, rows of one span and of several, more rows than a chunk has.
SHAPES = [
    *((0, 5), (1, 1), (3, 2), (700, 1), (301, 3), (77, 7), (130, 8), (600, 16), (37, 19), (65, 64)),
    *((9, 101), (33, 640), (6, 1100)),
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


@each("dtype", DTYPES)
@each("terms", [1, 2])
@each("shape", SHAPES)
def test_values_and_gates_agree_with_the_reference_with_every_option(
    cpu_backend, rng, shape, terms, dtype
):
    for (relu, limit), added in product(BOUNDS, (False, True)):
        value = deferred(rng, shape, dtype, terms=terms, plain=added, relu=relu, limit=limit)
        away_from_zero(value)
        wide = cast(value, np.float64)
        dy, add = (guarded(rng.standard_normal(shape).astype(dtype)) for _ in range(2))
        y, dx, plain = (guarded(np.full(shape, np.nan, dtype)) for _ in range(3))
        sums = guarded(np.full((1 + terms, shape[1]), np.nan))
        expected, exact = np.empty(shape), np.empty_like(sums)
        options = {"add": add if added else None}
        cpu_backend.fused.evaluate(value, out=y)
        cpu_backend.fused.gate(dy, value, out=dx, sums=sums, **options)
        cpu_backend.fused.gate(dy, value, out=plain, **options)
        REFERENCE.gate(dy, wide, out=expected, sums=exact, **options)
        for array in (y, dx, plain, sums):
            assert_guards_hold(array)
        assert_close(y, REFERENCE.values(wide), TOLERANCE[dtype])
        assert_close(dx, expected, TOLERANCE[dtype])
        assert_close(plain, expected, TOLERANCE[dtype])
        # A sum may be far smaller than its terms: in units of their norm.
        bound = TOLERANCE[dtype] * np.sqrt(max(shape[0], 1)) * 10
        np.testing.assert_allclose(sums, exact, rtol=0, atol=bound)


@each("every_set", [False, True])
@each("terms", [1, 2])
@each("kept", [False, True])
def test_a_gate_stops_what_is_not_finite_and_passes_all_where_the_value_is_nan(
    cpu_backend, backend, every_set, terms, kept
):
    used = cpu_backend if every_set else backend
    rng, shape = np.random.default_rng(0), (40, 21)
    x, dy = rng.normal(size=(terms, *shape)), rng.normal(size=shape)
    x[0, :10] = np.nan
    dy[::2] = rng.choice([np.nan, np.inf, -np.inf], size=(20, 21))
    value = Deferred(*(Term(used.asarray(part)) for part in x), relu=True)
    if kept:
        value.array = used.fused.values(value)
        np.testing.assert_array_equal(np.isnan(used.to_numpy(value.array)), np.isnan(x.sum(axis=0)))
    out = used.empty(shape, "float64")
    used.fused.gate(used.asarray(dy), value, out=out)
    expected = np.where(x.sum(axis=0) <= 0, 0, dy)
    np.testing.assert_array_equal(used.to_numpy(out), expected)


def test_a_gate_follows_the_values_that_were_kept(cpu_backend, rng):
    value = deferred(rng, (50, 20), terms=2)
    value.array = rng.standard_normal((50, 20))
    dy, out = rng.standard_normal((50, 20)), np.empty((50, 20))
    cpu_backend.fused.gate(dy, value, out=out)
    np.testing.assert_array_equal(out, dy * (value.array > 0))


@each("terms", [1, 2])
def test_values_may_be_rows_of_a_larger_array(cpu_backend, rng, terms):
    shape = 3, 5, 4, 7
    value = deferred(rng, (60, 7), terms=terms, relu=True)
    terms_ = [Term(x.reshape(shape), pivot, factor) for x, pivot, factor in value.terms]
    wide = np.full((3, 8, 4, 7), np.nan)
    value = Deferred(*terms_, shift=value.shift, relu=True)
    cpu_backend.fused.evaluate(value, out=wide[:, 2:7])
    np.testing.assert_array_equal(wide[:, 2:7], cpu_backend.fused.values(value))
    assert np.isnan(wide[:, :2]).all()
    assert np.isnan(wide[:, 7:]).all()


def test_coefficients_of_the_wrong_length_are_refused(cpu_backend):
    value = Deferred(Term(np.ones((4, 3)), np.ones(2)))
    with pytest.raises(ValueError, match="elements"):
        cpu_backend.fused.evaluate(value, out=np.empty((4, 3)))

"""Compiled kernels of deferred arrays against the reference, on every instruction set."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.reference import FusedKernels
from tests.each import each
from tests.kernels.guarded import guarded

REFERENCE = FusedKernels(np)


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

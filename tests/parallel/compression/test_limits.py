"""Sums of floats of 16 bits stay finite for every number of ranks, in whatever order they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pydtnn.comm.schedules.executor import add
from pydtnn.parallel.compression.floats import Format, _limit
from tests.each import each

FORMATS = {
    "float16": (Format(5, 10), np.dtype("float16")),
    "bfloat16": (Format(8, 7), np.dtype(ml_dtypes.bfloat16)),
}


def total(values: np.ndarray, rng: np.random.Generator) -> Any:
    """Add up values in a random order, of pairs that are drawn at random."""
    parts = list(values)
    while len(parts) > 1:
        a, b = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        into = np.array([a])
        add(into, np.array([b]))
        parts.append(into[0])
    return parts[0]


def chain(limit: float, size: int, dtype: np.dtype) -> Any:
    """Add up the limit `size` times, one after the other, as a ring does."""
    into, one = np.array([limit], dtype), np.array([limit], dtype)
    for _ in range(size - 1):
        add(into, one)
    return into[0]


@each("name", FORMATS)
def test_the_limit_may_be_added_up_for_every_number_of_ranks(name):
    form, dtype = FORMATS[name]
    for size in range(1, 257):
        limit = _limit(form, size)
        assert float(dtype.type(limit)) == limit  # a number of the format
        assert np.isfinite(float(chain(limit, size, dtype)))
        # Little is lost by that: 128 bfloat16, or 256 additions rounded up by 2**-8, are the worst.
        assert limit * size > (0.94 if size <= 10 else 0.36) * form.largest


@each("name", FORMATS)
def test_values_up_to_the_limit_may_be_added_in_any_order(name, rng):
    form, dtype = FORMATS[name]
    for size in (2, 3, 5, 10, 17, 33, 100, 255, 257, 700):
        limit = _limit(form, size)
        for low in (-1, 0.98, 1):
            values = (limit * rng.uniform(low, 1, size)).astype(dtype)
            assert np.isfinite(float(total(values, rng)))

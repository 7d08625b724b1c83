"""Sums of floats of 16 bits stay finite for every number of ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pydtnn.comm.schedules.executor import add
from pydtnn.parallel.compression.floats import _limit
from tests.each import each

TYPES = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


def chain(limit: float, size: int, dtype: np.dtype) -> Any:
    """Add up the limit `size` times, one after the other, as a ring does."""
    into, one = np.array([limit], dtype), np.array([limit], dtype)
    for _ in range(size - 1):
        add(into, one)
    return into[0]


@each("dtype", TYPES)
def test_the_limit_may_be_added_up_for_every_number_of_ranks(dtype):
    for size in range(1, 257):
        limit = _limit(dtype, size)
        assert float(dtype.type(limit)) == limit  # a number of the format
        assert np.isfinite(float(chain(limit, size, dtype)))
        # Little is lost by that: 128 bfloat16, or 256 additions rounded up by 2**-8, are the worst.
        assert limit * size > (0.94 if size <= 10 else 0.36) * float(ml_dtypes.finfo(dtype).max)

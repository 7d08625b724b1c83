"""The compressors of docs/extending.md do what the library's of the same kind do, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.parallel.compression import Compressor, create_sums
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged
from tests.test_extending import BLOCKS

TWINS: dict[str, Any] = {"compressor": create_sums("float16"), "top_k": create_sums("top_k")}


def compressor_of(block: str) -> Compressor:
    """Run a block and return the compressor it makes."""
    names: dict[str, Any] = {"np": np, "Compressor": Compressor}
    exec(BLOCKS[block], names)
    (made,) = (value for value in names.values() if isinstance(value, Compressor))
    return made


@pytest.mark.threads(1, 2, 3)
@each("block", TWINS)
def test_it_sums_as_the_one_of_the_library(comm: Any, block: str) -> None:
    results: list[list[np.ndarray]] = []
    for make in (compressor_of(block), TWINS[block]):
        buckets = buckets_of(bucket_bytes=1 << 9)
        sums = make(comm)
        sums.prepare(buckets)
        steps = [exchanged(comm, sums, buckets, step) for step in range(3)]
        results.append([array for step in steps for arrays in step for array in arrays])
    for given, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(given, wanted)

"""XXH64: published values, the compiled hash beside the reference, every bit counts."""

from __future__ import annotations

import numpy as np
import pytest

import pydtnn.kernels.cpu  # noqa: F401  # its OpenMP comes first
from pydtnn.kernels.cpu._hash import Hash64, hash_arrays
from tests.kernels.hash64 import hash64

# From the tests of xxHash and of its bindings, with seed 0.
PUBLISHED = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def hashes(*arrays: np.ndarray) -> list[int]:
    out = np.empty(len(arrays), np.uint64)
    hash_arrays([*arrays], out)
    return [int(value) for value in out]


def test_the_compiled_hash_is_that_of_the_reference_for_every_length_and_published():
    data = np.random.default_rng(0).integers(0, 256, 140, np.uint8)
    arrays = [data[start : start + n].copy() for n in range(70) for start in (0, 3)]
    assert hashes(*arrays) == [hash64(array) for array in arrays]
    arrays = [np.frombuffer(text, np.uint8) for text in PUBLISHED]
    assert hashes(*arrays) == [*PUBLISHED.values()] == [hash64(array) for array in arrays]
    x = np.random.default_rng(0).normal(size=(9, 4, 501)).astype("float32")  # above 64 KiB
    assert hashes(x, x.reshape(-1)) == [hash64(x)] * 2


def test_every_bit_and_the_order_change_the_hash():
    x = np.zeros(300, np.uint8)
    found = set(hashes(x))
    for bit in range(0, 8 * x.size, 7):
        x[bit // 8] ^= 1 << bit % 8
        found |= {*hashes(x)}
        x[bit // 8] = 0
    assert len(found) == 1 + len(range(0, 8 * x.size, 7))
    y = np.arange(64.0)
    assert hashes(y) != hashes(y[::-1].copy())
    assert hashes(-y) != hashes(y)


def test_the_hash_of_parts_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 70_000, np.uint8)
    for limit in (3, 40, 500, 70_000):
        parts, total, first = [], Hash64(), 0
        while first < min(len(data), 50 * limit):
            parts.append(data[first : first + rng.integers(limit + 1)])
            total.update(parts[-1])
            first += len(parts[-1])
            assert int(total.hexdigest(), 16) == hashes(data[:first])[0]
    assert Hash64().hexdigest() == f"{PUBLISHED[b'']:016x}"
    with pytest.raises(ValueError, match="not C-contiguous"):
        total.update(data[::2])


def test_arrays_that_are_not_contiguous_and_outputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="arrays must be contiguous"):
        hashes(np.zeros((4, 4))[:, 1])
    with pytest.raises(ValueError, match="a contiguous array of 1 elements of uint64"):
        hash_arrays([np.zeros(3)], np.empty(2, np.uint64))
    with pytest.raises(TypeError):
        hash_arrays([[1.0]], np.empty(1, np.uint64))

"""Compiled matrix products: what `test_every_kernel.py` does not ask of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.guarded import assert_close


def operands(rng: np.random.Generator, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Float64 arrays x, w, b, dy."""
    batch, inputs, outputs = size
    return {
        "x": rng.standard_normal((batch, inputs)),
        "w": rng.standard_normal((outputs, inputs)),
        "b": rng.standard_normal(outputs),
        "dy": rng.standard_normal((batch, outputs)),
    }


def test_forward_works_without_a_bias(cpu_backend, rng):
    for size in ((64, 30, 5), (5, 30, 64)):  # outputs in the lanes, and samples in the lanes
        arrays = operands(rng, size)
        out = np.empty_like(arrays["dy"])
        cpu_backend.linear.forward(arrays["x"], arrays["w"], None, out=out)
        assert_close(out, arrays["x"] @ arrays["w"].T, 1e-12)


def test_the_gradient_of_a_bias_sums_over_images(cpu_backend, rng):
    # Positive terms: one running float32 sum of 65,536 would be off by 1e-4.
    dy = rng.random((64, 32, 32, 5), dtype=np.float32)
    out = np.empty(5, np.float32)
    cpu_backend.linear.backward_bias(dy, out=out)
    assert_close(out, dy.sum(axis=(0, 1, 2), dtype=np.float64), 2e-6)


def test_other_types_run_on_the_reference(cpu_backend, rng):
    x, w = rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (5, 4))
    swapped = np.dtype(np.float32).newbyteorder()  # what a file of the other byte order holds
    for mine, theirs, result in ((np.int64, np.int64, np.int64), (np.float32, swapped, np.float32)):
        out = np.empty((3, 5), result)
        cpu_backend.linear.forward(x.astype(mine), w.astype(theirs), None, out=out)
        np.testing.assert_array_equal(out, x @ w.T)


def test_arrays_of_the_wrong_size_are_refused(cpu_backend):
    x, w = np.zeros((3, 4)), np.zeros((5, 4))
    with pytest.raises(ValueError, match="15 elements"):
        cpu_backend.linear.forward(x, w, None, out=np.empty((3, 4)))
    with pytest.raises(ValueError, match="20 elements"):
        cpu_backend.linear.backward_filter(x, np.zeros((3, 5)), out=np.empty((4, 4)))


def test_outputs_may_have_strides(cpu_backend, rng):
    arrays = operands(rng, (6, 30, 5))
    w, dy, linear = arrays["w"], arrays["dy"], cpu_backend.linear
    y, dx = np.zeros((6, 10))[:, ::2], np.zeros((6, 60))[:, ::2]
    linear.forward(arrays["x"], w, arrays["b"], out=y)
    linear.backward_data(dy, w, out=dx)
    assert_close(y, arrays["x"] @ w.T + arrays["b"], 1e-12)
    assert_close(dx, dy @ w, 1e-12)

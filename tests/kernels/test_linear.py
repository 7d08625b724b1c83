"""Compiled matrix products against the reference, on every instruction set of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.cpu.linear import Linear
from pydtnn.kernels.reference import Linear as Reference
from tests.kernels.guarded import assert_close, assert_guards_hold, guarded

REFERENCE = Reference(np)
KERNELS = ("forward", "backward_data", "backward_filter", "backward_bias")

# In norm. float32: sums of up to 2,000 products of both signs lose about sqrt(2000) / 2 of their
# last places of 6e-8, a few 1e-6; float64 the same in units of 1e-16.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}

SIZES = [  # batch, inputs, outputs
    (1, 1, 1),
    (0, 5, 7),
    (1, 37, 53),
    (2, 784, 10),
    (7, 13, 11),
    (16, 16, 16),
    (17, 33, 31),
    (64, 70, 10),
    (64, 10, 70),
    (64, 784, 129),
    (65, 512, 32),  # rows a power of two apart
    (250, 128, 19),
    (113, 47, 257),
    (600, 3, 1030),  # more samples and outputs than a block
    (70, 811, 230),  # rows and columns are cut otherwise for every number of threads
    (3, 1031, 300),
]


def operands(rng: np.random.Generator, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Float64 arrays x, w, b, dy."""
    batch, inputs, outputs = size
    return {
        "x": rng.standard_normal((batch, inputs)),
        "w": rng.standard_normal((outputs, inputs)),
        "b": rng.standard_normal(outputs),
        "dy": rng.standard_normal((batch, outputs)),
    }


def run(linear: Reference, kernel: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """One kernel on guarded copies, into an output full of NaN."""
    x, w, b, dy = (guarded(arrays[name]) for name in ("x", "w", "b", "dy"))
    like = {"forward": dy, "backward_data": x, "backward_filter": w, "backward_bias": b}[kernel]
    out = guarded(np.full_like(like, np.nan))
    if kernel == "forward":
        linear.forward(x, w, b, out=out)
    elif kernel == "backward_data":
        linear.backward_data(dy, w, out=out)
    elif kernel == "backward_filter":
        linear.backward_filter(x, dy, out=out)
    else:
        linear.backward_bias(dy, out=out)
    assert_guards_hold(out)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_kernels_agree_with_the_reference(
    cpu_backend: Backend, rng: np.random.Generator, size: tuple[int, int, int], dtype: Any
) -> None:
    arrays = {name: array.astype(dtype) for name, array in operands(rng, size).items()}
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    for kernel in KERNELS:
        value = run(cpu_backend.linear, kernel, arrays)
        assert value.dtype == dtype
        assert_close(value, run(REFERENCE, kernel, exact), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_number_of_threads_does_not_change_a_byte(
    cpu_backend: Backend, rng: np.random.Generator, size: tuple[int, int, int], dtype: Any
) -> None:
    arrays = {name: array.astype(dtype) for name, array in operands(rng, size).items()}
    one, *others = (
        create_backend("cpu", threads=n, isa=cpu_backend.isa).linear for n in (1, 2, 3, 5, 16)
    )
    for kernel in KERNELS:
        expected = run(one, kernel, arrays).tobytes()
        assert all(run(linear, kernel, arrays).tobytes() == expected for linear in others)


@pytest.mark.parametrize("size", [(5, 37, 19), (600, 24, 16), (0, 5, 7)], ids=str)
def test_gradients_of_parameters_are_added_when_told_to(
    cpu_backend: Backend, rng: np.random.Generator, size: tuple[int, int, int]
) -> None:
    arrays = operands(rng, size)
    x, dy, w, b = (arrays[name] for name in ("x", "dy", "w", "b"))
    dw, db = guarded(w), guarded(b)
    cpu_backend.linear.backward_filter(x, dy, out=dw, accumulate=True)
    cpu_backend.linear.backward_bias(dy, out=db, accumulate=True)
    assert_guards_hold(dw)
    assert_guards_hold(db)
    assert_close(dw, w + dy.T @ x, 1e-12)
    assert_close(db, b + dy.sum(axis=0), 1e-12)


def test_forward_works_without_a_bias(cpu_backend: Backend, rng: np.random.Generator) -> None:
    for size in ((64, 30, 5), (5, 30, 64)):  # outputs in the lanes, and samples in the lanes
        arrays = operands(rng, size)
        out = np.empty_like(arrays["dy"])
        cpu_backend.linear.forward(arrays["x"], arrays["w"], None, out=out)
        assert_close(out, arrays["x"] @ arrays["w"].T, 1e-12)


def test_the_gradient_of_a_bias_sums_over_images(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    # Positive terms: one running float32 sum of 65,536 would be off by 1e-4.
    dy = rng.random((64, 32, 32, 5), dtype=np.float32)
    out = np.empty(5, np.float32)
    cpu_backend.linear.backward_bias(dy, out=out)
    assert_close(out, dy.sum(axis=(0, 1, 2), dtype=np.float64), 2e-6)


def test_arrays_that_are_not_contiguous_give_the_same_result(
    cpu_backend: Backend, rng: np.random.Generator
) -> None:
    arrays = operands(rng, (6, 9, 11))
    x, w, dy = (np.asfortranarray(arrays[name]) for name in ("x", "w", "dy"))
    out = np.empty((11, 6)).T
    cpu_backend.linear.forward(x, w, None, out=out)
    assert_close(out, x @ w.T, 1e-12)
    dw = np.empty((11, 9))
    cpu_backend.linear.backward_filter(x[::2], dy[::2], out=dw)
    assert_close(dw, dy[::2].T @ x[::2], 1e-12)


def test_other_types_run_on_the_reference(cpu_backend: Backend, rng: np.random.Generator) -> None:
    x, w = rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (5, 4))
    swapped = np.dtype(np.float32).newbyteorder()  # what a file of the other byte order holds
    for mine, theirs, result in ((np.int64, np.int64, np.int64), (np.float32, swapped, np.float32)):
        out = np.empty((3, 5), result)
        cpu_backend.linear.forward(x.astype(mine), w.astype(theirs), None, out=out)
        np.testing.assert_array_equal(out, x @ w.T)


def test_arrays_of_the_wrong_size_are_refused(cpu_backend: Backend) -> None:
    x, w = np.zeros((3, 4)), np.zeros((5, 4))
    with pytest.raises(ValueError, match="15 elements"):
        cpu_backend.linear.forward(x, w, None, out=np.empty((3, 4)))
    with pytest.raises(ValueError, match="20 elements"):
        cpu_backend.linear.backward_filter(x, np.zeros((3, 5)), out=np.empty((4, 4)))


def test_hot_kernels_are_compiled(cpu_backend: Backend) -> None:
    assert isinstance(cpu_backend.linear, Linear)
    for kernel in KERNELS:
        assert getattr(Linear, kernel) is not getattr(Reference, kernel)

"""Fully connected layers of the cuda backend, their kernels emulated, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.cuda.linear import Linear
from pydtnn.kernels.reference import Linear as Reference
from tests.kernels.guarded import assert_close
from tests.kernels.test_linear import KERNELS, SIZES, TOLERANCE, operands
from tests.simulated.host import emulated_cupy, families, on_device
from tests.simulated.kernels import COMPILER
from tests.simulated.libraries import multiply

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

REFERENCE = Reference(np)


@pytest.fixture(scope="module")
def linear() -> Linear:
    return Linear(emulated_cupy(), families().device, multiply)


def run(family: Reference, kernel: str, arrays: dict[str, Any], **options: bool) -> Any:
    """One kernel, into an output full of 1."""
    x, w, b, dy = (arrays[name] for name in ("x", "w", "b", "dy"))
    like = {"forward": dy, "backward_data": x, "backward_filter": w, "backward_bias": b}[kernel]
    out = on_device(np.ones_like(like))
    if kernel == "forward":
        family.forward(x, w, b, out=out)
    elif kernel == "backward_data":
        family.backward_data(dy, w, out=out)
    elif kernel == "backward_filter":
        family.backward_filter(x, dy, out=out, **options)
    else:
        family.backward_bias(dy, out=out, **options)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_kernels_agree_with_the_reference(
    linear: Linear, rng: np.random.Generator, size: tuple[int, int, int], dtype: Any
) -> None:
    arrays = {name: on_device(a.astype(dtype)) for name, a in operands(rng, size).items()}
    exact = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    for kernel in KERNELS:
        value = run(linear, kernel, arrays)
        assert value.dtype == dtype
        assert_close(value, run(REFERENCE, kernel, exact), TOLERANCE[dtype])
    for kernel in ("backward_filter", "backward_bias"):
        added = run(linear, kernel, arrays, accumulate=True)
        assert_close(added, 1 + run(REFERENCE, kernel, exact), TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_beside_16_bits_biases_and_gradients_of_parameters_are_of_float32(
    linear: Linear, rng: np.random.Generator, size: tuple[int, int, int], dtype: str, bound: float
) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    arrays = {name: on_device(a.astype(kind)) for name, a in operands(rng, size).items()}
    exact = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    x, w, dy = (arrays[name] for name in ("x", "w", "dy"))
    b = on_device(exact["b"].astype(np.float32))
    y, dx = on_device(np.empty_like(dy)), on_device(np.empty_like(x))
    linear.forward(x, w, b, out=y)
    linear.backward_data(dy, w, out=dx)
    assert_close(y.astype(np.float64), run(REFERENCE, "forward", exact), bound)
    assert_close(dx.astype(np.float64), run(REFERENCE, "backward_data", exact), bound)
    dw, db = (on_device(np.ones(a.shape, np.float32)) for a in (w, b))
    linear.backward_filter(x, dy, out=dw, accumulate=True)
    linear.backward_bias(dy, out=db, accumulate=True)
    for value, kernel in ((dw, "backward_filter"), (db, "backward_bias")):
        assert value.dtype == np.float32
        assert_close(value, 1 + run(REFERENCE, kernel, exact), 1e-5)


def test_arrays_that_are_not_contiguous_give_the_same_result(
    linear: Linear, rng: np.random.Generator
) -> None:
    arrays = operands(rng, (6, 9, 11))
    turned = {name: on_device(np.asfortranarray(array)) for name, array in arrays.items()}
    for kernel in KERNELS:
        assert_close(run(linear, kernel, turned), run(REFERENCE, kernel, arrays), 1e-12)


def test_kernels_are_ours_and_not_the_reference() -> None:
    assert all(getattr(Linear, kernel) is not getattr(Reference, kernel) for kernel in KERNELS)

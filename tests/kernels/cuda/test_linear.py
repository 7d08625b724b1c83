"""Fully connected layers of the cuda backend, their kernels emulated, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.cuda.linear import Linear
from pydtnn.kernels.reference import Linear as Reference
from tests.kernels.cuda.emulator import COMPILER, emulated_cupy, families, on_device
from tests.kernels.cuda.on_host import multiply
from tests.kernels.guarded import assert_close
from tests.kernels.test_linear import KERNELS, SIZES, TOLERANCE, operands

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

REFERENCE = Reference(np)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Linear:
    return Linear(emulated_cupy(), families(tmp_path_factory.mktemp("linear")).device, multiply)


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


def test_arrays_that_are_not_contiguous_give_the_same_result(
    linear: Linear, rng: np.random.Generator
) -> None:
    arrays = operands(rng, (6, 9, 11))
    turned = {name: on_device(np.asfortranarray(array)) for name, array in arrays.items()}
    for kernel in KERNELS:
        assert_close(run(linear, kernel, turned), run(REFERENCE, kernel, arrays), 1e-12)


def test_kernels_are_ours_and_not_the_reference() -> None:
    assert all(getattr(Linear, kernel) is not getattr(Reference, kernel) for kernel in KERNELS)

"""Every kernel of our own against the reference, on a GPU, or simulated where there is none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.kernels.reference import FAMILIES
from tests.conftest import cuda_backend
from tests.gpu import to_host
from tests.kernels.checks import REFERENCE
from tests.kernels.every_kernel import IN_PLACE_ON_GPU, MAKERS, Case, cases, in_place

# In norm, beside the reference in float64 on the same numbers. A result of 16 bits is rounded once,
# to 2^-12 and 2^-9 of itself; what is added up of such results, as often as there are.
BOUNDS = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
ELSEWHERE = ("conv", "linear", "attention", "recurrent")
"""Tested in test_on_gpu.py and test_conv.py, or without kernels there."""
REALS = ("update",)  # parameters, gradients and state are never of 16 bits
REFERENCE_ONLY = {
    *("norm.local_response_forward", "norm.local_response_backward"),
    *("norm.rms_forward", "norm.rms_backward"),
    *("elementwise.largest", "elementwise.hadamard", "elementwise.round"),
    *("update.adagrad", "update.lion", "loss.weighted_cross_entropy"),
}
"""Kernels that run on the arrays of a GPU as on those of the host."""


@pytest.fixture(scope="module")
def cuda() -> Backend:
    return cuda_backend()


def check(backend: Backend, case: Case, dtype: str) -> None:
    given = case.typed(dtype)
    exact = {
        name: array if array.dtype.kind in "iu" else array.astype("float64")
        for name, array in given.items()
    }
    with np.errstate(divide="ignore", invalid="ignore"):  # of the moments of no rows
        expected = case.run(REFERENCE, exact)
    arrays = {name: backend.asarray(array) for name, array in given.items()}
    value = case.run(backend, arrays)
    actual = {name: to_host(array).astype("float64") for name, array in arrays.items()}
    if expected is not None:
        actual["value"], exact["value"] = np.float64(to_host(value)), np.float64(expected)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for name, array in actual.items():
        with np.errstate(invalid="ignore"):
            difference = np.where(array == exact[name], 0, array - exact[name])  # also infinite
        error, size = (float(np.linalg.norm(a.ravel())) for a in (difference, exact[name]))
        unread = np.isnan(exact[name]).all() and np.isnan(array).all()  # outputs of other kernels
        bound = BOUNDS[dtype] * size + smallest * array.size**0.5
        assert unread or error <= bound, f"{name}: {error} of {size}"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kernel", MAKERS)
def test_a_kernel_agrees_with_the_reference_in_every_type(cuda, rng, kernel, dtype):
    if dtype not in ("float32", "float64") and kernel.startswith(REALS):
        pytest.skip("update kernels take float32 masters")
    for case in cases(kernel, rng):
        check(cuda, case, dtype)
    assert not to_host(cuda.update.device.arrived).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernel", IN_PLACE_ON_GPU)
def test_an_output_may_be_an_input(cuda, rng, kernel):
    for case, out, name in in_place(kernel, rng):
        results = []
        for same in (False, True):
            arrays = {n: cuda.asarray(array) for n, array in case.typed("float32").items()}
            arrays[out] = arrays[name if same else out]
            case.run(cuda, arrays)
            results.append(to_host(arrays[out]).tobytes())
        assert results[0] == results[1]


def test_every_kernel_of_the_reference_has_cases_or_tests_elsewhere():
    kernels = {
        f"{family}.{kernel}"
        for family, kinds in FAMILIES.items()
        for kernel in vars(kinds)
        if not kernel.startswith("_")
    }
    missing = {name for name in kernels - MAKERS.keys() if name.split(".")[0] not in ELSEWHERE}
    of_a_few_numbers = {"norm.constant_sums", "norm.moments", "norm.sums_length"}
    values = "fused.values"  # returns what `evaluate` computes
    assert missing - of_a_few_numbers == REFERENCE_ONLY | {values}


def test_kernels_are_ours_in_every_family(cuda):
    for name in MAKERS:
        family, kernel = name.split(".")
        who = getattr(type(vars(cuda)[family]), kernel).__module__
        assert who.startswith("pydtnn.kernels.cuda"), f"{name} is of {who}"

"""Every kernel of the host beside the reference in float64, in every type; see `every_kernel.py`.

Elements of 16 bits are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend, report
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import FAMILIES
from tests.each import each
from tests.kernels.checks import REFERENCE, same_for_all_threads
from tests.kernels.every_kernel import IN_PLACE, MAKERS, OF_THE_HOST, Case, cases, in_place
from tests.kernels.guarded import assert_guards_hold, guarded
from tests.kernels.test_backend import COLD, COMBINED

KERNELS = [*(MAKERS | OF_THE_HOST)]
BOUNDS = {"float64": 1e-13, "float32": 6e-6, "float16": 2e-5, "bfloat16": 2e-5}
"""Error relative to the largest element, beside the rounding to 16 bits: sums of up to 9,000."""

SERIAL = 32768
"""Elements below which kernels run in one thread (src/parts.h)."""

Results = dict[str, np.ndarray]
Place = Callable[[str, np.ndarray], np.ndarray]


@cache
def arrays_of(make: Callable[..., Any]) -> list[Any]:
    return [*make(np.random.default_rng(0))]


def drawn(kernel: str) -> list[Case]:
    return cases(kernel, arrays_of((MAKERS | OF_THE_HOST)[kernel][0]))


def run(backend: Backend, case: Case, arrays: Results) -> Results:
    """Call the kernel; the arrays afterwards, and what it returns."""
    given = {name: float(a[0]) if name[0] == "s" else a for name, a in arrays.items()}
    with np.errstate(divide="ignore", invalid="ignore"):  # of the moments of no rows
        value = case.run(backend, given)
    return arrays if value is None else {**arrays, "d value": np.asarray(value)}


def exact(kernel: str, dtype: str) -> list[tuple[Case, Results]]:
    """What the reference makes of the same numbers in float64."""
    found = []
    for case in drawn(kernel):
        arrays = case.typed(dtype)
        wide = {n: a if a.dtype.kind in "iu" else a.astype("float64") for n, a in arrays.items()}
        found.append((case, run(REFERENCE, case, wide)))
    return found


def check(backend: Backend, kernel: str, dtype: str, expected: Any, place: Place) -> None:
    for case, results in expected:
        arrays = {n: place(n, a) for n, a in case.typed(dtype).items()}
        for name, value in run(backend, case, arrays).items():
            want = results[name]
            if value.dtype.kind in "iu":
                np.testing.assert_array_equal(value, want)
                continue
            known = ~np.isnan(want)
            np.testing.assert_array_equal(np.isnan(value), ~known, err_msg=f"{kernel}: {name}")
            value, want = value[known].astype("float64"), want[known]
            allowed = BOUNDS[dtype] * abs(want).max(initial=0)
            if arrays.get(name, value).dtype == dtype != arithmetic(dtype):
                allowed = allowed + 0.5 * np.spacing(abs(want).astype(dtype)).astype("float64")
            with np.errstate(invalid="ignore"):
                error = np.where(value == want, 0, abs(value - want))  # also infinite
            assert (error <= allowed).all(), f"{kernel} {name}: {error.max()}, largest {allowed}"


def guard(array: np.ndarray) -> np.ndarray:
    return guarded(array) if array.dtype.kind not in "iu" else array.copy()


def types(kernel: str, dtype: str) -> bool:
    """Whether a kernel has arrays of a type: parameters and their state are of float32."""
    return not kernel.startswith("update") or np.dtype(dtype).itemsize > 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_kernel_agrees_with_the_reference(cpu_backend, once, dtype):
    """And neither reads nor writes what lies around its arrays."""
    placed: list[np.ndarray] = []

    def place(name: str, array: np.ndarray) -> np.ndarray:
        placed.append(guard(array))
        return placed[-1]

    for kernel in KERNELS:
        if types(kernel, dtype):
            check(cpu_backend, kernel, dtype, once(exact, kernel, dtype), place)
            for array in placed:
                if array.dtype.kind not in "iu":
                    assert_guards_hold(array)
            placed.clear()


@pytest.mark.parametrize(("name", "dtype"), [("numpy", "bfloat16"), ("cpu", "float16")])
def test_so_does_the_reference_which_also_runs_float16(once, name, dtype):
    for kernel in KERNELS:
        if types(kernel, dtype):
            small = [(case, r) for case, r in once(exact, kernel, dtype) if size(case) < SERIAL]
            check(create_backend(name), kernel, dtype, small, lambda _, a: a)


def spread(array: np.ndarray) -> np.ndarray:
    """The same as every other element of an array of NaN."""
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan)
    wide[..., ::2] = array
    return wide[..., ::2]


@each("kernel", KERNELS)
def test_arrays_that_are_not_contiguous_give_the_same_values(cpu_backend, once, kernel):
    """All that have elements of a type, and each alone; sums and coefficients are contiguous."""
    small = [(case, r) for case, r in once(exact, kernel, "float64") if size(case) < SERIAL]
    names = [name for name in small[0][0].arrays if name[0] == "x"]
    for apart in (names, *([name] for name in names)):
        check(
            *(cpu_backend, kernel, "float64", small[: 4 if apart is names else 3]),
            lambda name, array, apart=apart: spread(array) if name in apart else array,
        )


@each("dtype", ["float32", "float64"])
@each("kernel", IN_PLACE)
def test_an_output_may_be_an_input(cpu_backend, kernel, dtype):
    made = arrays_of((MAKERS | OF_THE_HOST)[kernel][0])
    for (case, out, name), backend in product(in_place(kernel, made), (cpu_backend, REFERENCE)):
        apart, own = case.typed(dtype), case.typed(dtype)
        own[out] = own[name]
        expected, found = run(backend, case, apart), run(backend, case, own)
        assert found[out].tobytes() == expected[out].tobytes(), (case.calls, backend.name)
        assert found.get("d value", 0) == expected.get("d value", 0)


def size(case: Case) -> int:
    return max(array.size for array in case.arrays.values())


@each("kernel", KERNELS)
def test_the_number_of_threads_does_not_change_a_byte(cpu_backend, kernel):
    every = drawn(kernel)
    for case in [case for case in every if size(case) >= SERIAL] or every:

        def results(backend: Backend, case: Case = case) -> list[np.ndarray]:
            return [*run(backend, case, case.typed("float32")).values()]

        same_for_all_threads(cpu_backend, results)


@each("dtype", ["float32", "float64"])
@each("kernel", [k for k in KERNELS if k not in COLD | COMBINED | {"elementwise.convert"}])
def test_no_hot_kernel_runs_on_the_reference(cpu_backend, monkeypatch, kernel, dtype):
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError(f"{kernel} runs on the reference")

    family, name = kernel.split(".")
    monkeypatch.setattr(FAMILIES[family], name, refuse)
    case = max(drawn(kernel), key=size)
    run(cpu_backend, case, case.typed(dtype))


def test_no_kernel_is_left_out():
    kernels = {k for k in report(REFERENCE) if not k.startswith("recurrent")}  # test_recurrent.py
    without = {"norm.constant_sums", "norm.moments", "norm.sums_length", "conv.takes_sums"}
    elsewhere = {
        "elementwise.largest",
        "elementwise.hadamard",
        "elementwise.round",
    }  # test_rounding.py
    parts = {"attention.product", "fused.values"}  # which others call
    assert kernels - without - elsewhere - parts - COMBINED == {*KERNELS} - COMBINED

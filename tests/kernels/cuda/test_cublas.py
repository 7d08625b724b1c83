"""How matrices are described to cuBLAS, which counts columns first."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels.cuda import cublas
from pydtnn.kernels.cuda.cublas import (
    DEFAULT_ALGORITHM,
    FLOAT32,
    FLOAT64,
    FULL_SUMS,
    NO,
    PROTOTYPES,
    TF32,
    YES,
    CublasError,
    Products,
    batch_step,
    declared,
    layout,
)
from tests.kernels.cuda.headers import check_prototypes, header, installed, numbers


def as_cublas_reads(matrix: np.ndarray) -> np.ndarray:
    """What cuBLAS makes of the description of a matrix: its transpose, element by element."""
    turned, row = layout(matrix)
    rows, columns = matrix.shape
    buffer = np.lib.stride_tricks.as_strided(
        matrix, (max(row, 1) * max(rows, columns),), (matrix.itemsize,)
    )
    result = np.empty((columns, rows))
    for i in range(columns):
        for j in range(rows):
            # op(A)[i, j]; A is stored by columns of `row` elements
            result[i, j] = buffer[i + j * row] if turned == NO else buffer[j + i * row]
    return result


BASE = np.arange(20000.0)
MATRICES = {
    "in order": BASE[:35].reshape(5, 7),
    "transposed": BASE[:35].reshape(7, 5).T,
    "rows with gaps": BASE[: 5 * 11].reshape(5, 11)[:, 2:9],
    "columns with gaps": BASE[: 5 * 11].reshape(5, 11)[:, 2:9].T,
    "every other row": BASE[:140].reshape(20, 7)[::2],
    "one row": BASE[:7].reshape(1, 7),
    "one row of many": BASE[:77].reshape(11, 7)[3:4],
    "one column": BASE[:7].reshape(7, 1),
    "one column of many": BASE[:77].reshape(11, 7)[:, 3:4],
    "one row across": BASE[:77].reshape(11, 7)[:, 3:4].T,
    "one element": BASE[5:6].reshape(1, 1),
    "a group": BASE[:60].reshape(5, 3, 4).transpose(1, 0, 2)[1],
    "a group of one": BASE[:15].reshape(5, 3, 1).transpose(1, 0, 2)[1],
}


@pytest.mark.parametrize("case", MATRICES)
def test_cublas_reads_the_matrix_that_is_meant(case):
    np.testing.assert_array_equal(as_cublas_reads(MATRICES[case]), MATRICES[case].T)


def test_a_matrix_without_contiguous_rows_or_columns_is_refused():
    with pytest.raises(ValueError, match="neither rows nor columns .* copy it"):
        layout(BASE[:64].reshape(8, 8)[::2, ::2])


def test_groups_are_a_batch_whose_matrices_interleave():
    groups = BASE[:60].reshape(5, 3, 4).transpose(1, 0, 2)
    assert layout(groups) == (NO, 12)
    assert batch_step(groups) == 4
    assert batch_step(groups[0]) == 0


def test_prototypes_and_numbers_are_those_of_the_header():
    library = installed("cublas")
    call = declared(library)
    with pytest.raises(CublasError, match="cublasSetStream_v2 failed: CUBLAS_STATUS_NOT_INIT"):
        call["cublasSetStream_v2"](None, None)
    text = header(library, "cublas_api.h")
    check_prototypes(PROTOTYPES, text)
    known = numbers(text)
    assert known["CUBLAS_OP_N"] == NO
    assert known["CUBLAS_OP_T"] == YES
    assert known["CUBLAS_COMPUTE_32F"] == FLOAT32
    assert known["CUBLAS_COMPUTE_32F_FAST_TF32"] == TF32
    assert known["CUBLAS_COMPUTE_64F"] == FLOAT64
    assert known["CUBLAS_GEMM_DEFAULT"] == DEFAULT_ALGORITHM
    assert known["CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION"] == FULL_SUMS


class Recorder:
    """A cuBLAS that keeps what it is called with, and a CuPy with one stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[tuple[Any, ...]] = []
        call: dict[str, Any] = dict.fromkeys(PROTOTYPES, lambda *arguments: None)
        call["cublasGemmStridedBatchedEx"] = lambda *arguments: self.products.append(arguments)
        monkeypatch.setattr(cublas, "declared", lambda library: call)
        stream = SimpleNamespace(ptr=1)
        memory = SimpleNamespace(ptr=256)
        cuda = SimpleNamespace(get_current_stream=lambda: stream, Memory=lambda size: memory)
        self.cupy: Any = SimpleNamespace(cuda=cuda)

    def multiply(self, a: Any, b: Any, out: Any, *, accumulate: bool, tf32: bool) -> Any:
        """Return the arguments of the product."""
        library: Any = None
        Products(library, self.cupy, tf32=tf32)(*map(on_device, (a, b, out)), accumulate)
        return self.products[-1]


def on_device(array: np.ndarray) -> Any:
    pointer = SimpleNamespace(ptr=array.ctypes.data)
    names = {"shape": array.shape, "strides": array.strides, "dtype": array.dtype}
    rest = {"ndim": array.ndim, "itemsize": array.itemsize, "nbytes": array.nbytes}
    return SimpleNamespace(data=pointer, **names, **rest)


@pytest.mark.parametrize(
    ("inputs", "output", "tf32", "kinds", "compute"),
    [
        ("float32", "float32", True, (0, 0), TF32),
        ("float32", "float32", False, (0, 0), FLOAT32),
        ("float64", "float64", True, (1, 1), FLOAT64),
        ("float16", "float16", True, (2, 2), FLOAT32),
        ("float16", "float32", False, (2, 0), FLOAT32),
        ("bfloat16", "float32", True, (14, 0), FLOAT32),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_16_bits_are_added_up_in_float32_and_may_be_stored_so(
    monkeypatch, inputs, output, tf32, kinds, compute, accumulate
):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if inputs == "bfloat16" else inputs
    a, b, out = np.zeros((5, 7), dtype), np.zeros((7, 3), dtype), np.zeros((5, 3), output)
    given = Recorder(monkeypatch).multiply(a, b, out, accumulate=accumulate, tf32=tf32)
    assert given[3:6] == (3, 5, 7)  # columns, rows, what is summed over
    assert (given[8], given[12], given[17]) == (kinds[0], kinds[0], kinds[1])
    assert given[20:] == (1, compute, DEFAULT_ALGORITHM)
    scalar = ctypes.c_double if inputs == "float64" else ctypes.c_float
    assert (type(given[15]._obj), given[15]._obj.value) == (scalar, float(accumulate))

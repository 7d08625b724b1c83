"""How matrices are described to cuBLAS, which counts columns first."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.cublas import NO, PROTOTYPES, CublasError, batch_step, declared, layout


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
def test_cublas_reads_the_matrix_that_is_meant(case: str) -> None:
    np.testing.assert_array_equal(as_cublas_reads(MATRICES[case]), MATRICES[case].T)


def test_a_matrix_without_contiguous_rows_or_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="neither rows nor columns .* copy it"):
        layout(BASE[:64].reshape(8, 8)[::2, ::2])


def test_groups_are_a_batch_whose_matrices_interleave() -> None:
    groups = BASE[:60].reshape(5, 3, 4).transpose(1, 0, 2)
    assert layout(groups) == (NO, 12)
    assert batch_step(groups) == 4
    assert batch_step(groups[0]) == 0


def test_prototypes_have_as_many_arguments_as_in_the_header() -> None:
    try:
        library = libraries.load("cublas")
    except libraries.Unavailable as error:
        pytest.skip(str(error))
    call = declared(library)
    with pytest.raises(CublasError, match="cublasSetStream_v2 failed: CUBLAS_STATUS_NOT_INIT"):
        call["cublasSetStream_v2"](None, None)
    header = Path(library.path).parents[1] / "include" / "cublas_api.h"
    if not header.exists():
        pytest.skip(f"cuBLAS's header is not in {header.parent}")
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    for name, arguments in PROTOTYPES.items():
        found = re.search(rf"\b{name}\(([^)]*)\);", text)
        assert found, f"{name} is not in the header"
        assert len(found[1].split(",")) == len(arguments), name

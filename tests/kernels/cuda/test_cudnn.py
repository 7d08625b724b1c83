"""cuDNN without a GPU: prototypes, descriptors and output shapes of the library itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels.cuda import cudnn_graph
from pydtnn.kernels.cuda.cudnn import (
    CONVERSION_MATH,
    CROSS_CORRELATION,
    DATA_TYPES,
    DEFAULT_MATH,
    DETERMINISTIC,
    DIRECTIONS,
    FMA_MATH,
    NHWC,
    NOT_SUPPORTED,
    PROTOTYPES,
    TENSOR_OP_MATH,
    Cudnn,
    CudnnError,
)
from pydtnn.kernels.cuda.cudnn_conv import even, inside, is_even, pad
from pydtnn.kernels.reference import ConvKernels
from tests.kernels.cuda.headers import check_prototypes, header, installed, numbers
from tests.kernels.geometries import AWKWARD
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import operands

REFERENCE = ConvKernels(np)
TYPES = (
    *("HANDLE", "DATA_TYPE", "BOOLEAN", "INT64", "FLOAT", "VOID_PTR", "HEUR_MODE"),
    *("CONVOLUTION_MODE", "NUMERICAL_NOTE", "POINTWISE_MODE", "GENSTATS_MODE"),
)
CASES = [case for case, (batch, _) in AWKWARD.items() if batch]


@pytest.fixture
def cudnn() -> Cudnn:
    return Cudnn(installed("cudnn"))


def test_prototypes_are_those_of_the_headers(cudnn):
    check_prototypes(PROTOTYPES, header(cudnn.library, "cudnn_*_v9.h"))


def test_numbers_are_those_of_the_headers(cudnn):
    known = numbers(header(cudnn.library, "cudnn_*_v9.h"))
    graph, note = cudnn_graph, "NUMERICAL_NOTE_"
    ours = {
        **{"TENSOR_NHWC": NHWC, "CROSS_CORRELATION": CROSS_CORRELATION, "FMA_MATH": FMA_MATH},
        **{"DETERMINISTIC": DETERMINISTIC, "STATUS_NOT_SUPPORTED": NOT_SUPPORTED},
        **{"DEFAULT_MATH": DEFAULT_MATH, "TENSOR_OP_MATH": TENSOR_OP_MATH},
        "TENSOR_OP_MATH_ALLOW_CONVERSION": CONVERSION_MATH,
        **{f"BACKEND_{kind}_DESCRIPTOR": number for kind, number in graph.KINDS.items()},
        **{f"ATTR_{name}": number for name, (number, _) in graph.ATTRIBUTES.items()},
        **{f"TYPE_{name}": vars(graph)[name].number for name in TYPES},
        "TYPE_BACKEND_DESCRIPTOR": graph.DESCRIPTOR.number,
        **dict(zip(("HEUR_MODE_A", "HEUR_MODE_FALLBACK"), graph.HEURISTICS, strict=True)),
        **{"POINTWISE_ADD": graph.ADD, "POINTWISE_RELU_FWD": graph.RELU},
        "GENSTATS_SUM_SQSUM": graph.SUM_SQUARES,
        f"{note}DOWN_CONVERT_INPUTS": graph.DOWN_CONVERTED,
        f"{note}REDUCED_PRECISION_REDUCTION": graph.REDUCED_SUMS,
        f"{note}NONDETERMINISTIC": graph.NONDETERMINISTIC,
    }
    names = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
    ours |= {f"DATA_{names[dtype]}": number for dtype, number in DATA_TYPES.items()}
    assert {name: known[f"CUDNN_{name}"] for name in ours} == ours


def test_algorithms_have_the_numbers_of_the_headers(cudnn):
    path = Path(cudnn.library.path).parents[1] / "include" / "cudnn_ops.h"
    if not path.exists():
        pytest.skip(f"cuDNN's headers are not in {path.parent}")
    for direction, kind in [
        ("forward", "FWD"),
        ("backward_data", "BWD_DATA"),
        ("backward_filter", "BWD_FILTER"),
    ]:
        lines = re.findall(rf"CUDNN_CONVOLUTION_{kind}_ALGO_(\w+)\s*= (\d+)(.*)", path.read_text())
        usable = {
            int(number)
            for name, number, words in lines
            if name not in ("COUNT", "DIRECT")
            and "non-deterministic" not in words.lower()
            and "not implemented" not in words
        }
        assert set(DIRECTIONS[direction].algorithms) == usable


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_cudnn_computes_the_output_shapes_that_we_do(cudnn, case, dtype):
    batch, geometry = AWKWARD[case]
    g = even(geometry)
    x, w = cudnn.tensor(batch, g.size, g.channels, dtype), cudnn.filters(g, dtype)
    axes = 2 + max(2, len(g.size))
    shape = cudnn.output_shape(cudnn.convolution(g, dtype), x, w, axes)
    assert shape[:2] == (batch, geometry.filters)
    assert tuple(n for n in shape[2:])[-len(g.size) :] == geometry.output


def test_errors_are_sentences_that_name_the_function_and_the_reason(cudnn):
    with pytest.raises(CudnnError, match=r"^cuDNN: cudnnSetTensorNdDescriptorEx failed: .*PARAM"):
        cudnn.tensor(-1, (8, 8), 3, "float32")


def test_only_what_is_not_supported_counts_as_unsupported():
    assert CudnnError("f", 3000, "").unsupported
    assert CudnnError("f", 3007, "").unsupported
    assert not any(CudnnError("f", status, "").unsupported for status in (1001, 2000, 4000, 5000))


@pytest.mark.parametrize("case", CASES)
def test_a_padded_input_gives_the_same_convolution(rng, case):
    batch, geometry = AWKWARD[case]
    arrays, g = operands(rng, batch, geometry), even(geometry)
    assert is_even(g)
    assert g.output == geometry.output
    padded = np.full((batch, *g.size, g.channels), np.nan)
    if is_even(geometry):
        assert g is geometry
        padded[...] = arrays["x"]
    else:
        pad(arrays["x"], geometry, out=padded)
        np.testing.assert_array_equal(padded[:, *inside(geometry)], arrays["x"])
    value, expected = np.empty_like(arrays["dy"]), np.empty_like(arrays["dy"])
    REFERENCE.forward(padded, arrays["w"], None, g, out=value)
    REFERENCE.forward(arrays["x"], arrays["w"], None, geometry, out=expected)
    assert_close(value, expected, 1e-14)

"""cuDNN without a GPU: prototypes, descriptors and output shapes of the library itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.cudnn import DIRECTIONS, PROTOTYPES, Cudnn, CudnnError
from pydtnn.kernels.cuda.cudnn_conv import even, inside, is_even, pad
from pydtnn.kernels.reference import Conv as Reference
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import AWKWARD, operands

REFERENCE = Reference(np)
CASES = [case for case, (batch, _) in AWKWARD.items() if batch]


@pytest.fixture
def cudnn() -> Cudnn:
    try:
        return Cudnn(libraries.load("cudnn"))
    except libraries.Unavailable as error:
        pytest.skip(str(error))


def test_prototypes_have_as_many_arguments_as_in_the_headers(cudnn: Cudnn) -> None:
    folder = Path(cudnn.library.path).parents[1] / "include"
    text = "".join(path.read_text() for path in folder.glob("cudnn_*_v9.h"))
    if not text:
        pytest.skip(f"cuDNN's headers are not in {folder}")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for name, arguments in PROTOTYPES.items():
        found = re.search(rf"\b{name}\(([^)]*)\);", text)
        assert found, f"{name} is not in the headers"
        assert len(found[1].split(",")) == len(arguments), name


def test_algorithms_have_the_numbers_of_the_headers(cudnn: Cudnn) -> None:
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
            and "Non-deterministic" not in words
            and "not implemented" not in words
        }
        assert set(DIRECTIONS[direction].algorithms) == usable


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_cudnn_computes_the_output_shapes_that_we_do(cudnn: Cudnn, case: str, dtype: str) -> None:
    batch, geometry = AWKWARD[case]
    g = even(geometry)
    x, w = cudnn.tensor(batch, g.size, g.channels, dtype), cudnn.filters(g, dtype)
    axes = 2 + max(2, len(g.size))
    shape = cudnn.output_shape(cudnn.convolution(g, dtype), x, w, axes)
    assert shape[:2] == (batch, geometry.filters)
    assert tuple(n for n in shape[2:])[-len(g.size) :] == geometry.output


def test_errors_are_sentences_that_name_the_function_and_the_reason(cudnn: Cudnn) -> None:
    with pytest.raises(CudnnError, match=r"^cuDNN: cudnnSetTensorNdDescriptorEx failed: .*PARAM"):
        cudnn.tensor(-1, (8, 8), 3, "float32")


def test_only_what_is_not_supported_counts_as_unsupported() -> None:
    assert CudnnError("f", 3000, "").unsupported
    assert CudnnError("f", 3007, "").unsupported
    assert not any(CudnnError("f", status, "").unsupported for status in (1001, 2000, 4000, 5000))


@pytest.mark.parametrize("case", CASES)
def test_a_padded_input_gives_the_same_convolution(rng: np.random.Generator, case: str) -> None:
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


def test_geometries_are_not_changed_where_cudnn_can_pad() -> None:
    geometry = ConvGeometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 3, 4)
    assert even(geometry) is geometry

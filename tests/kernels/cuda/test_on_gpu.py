"""Convolutions, pooling and a step on a GPU against the reference; they say why where none is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda import CudaBackend, Unavailable
from pydtnn.kernels.reference import ConvKernels
from tests.kernels.cuda.test_every_kernel import check
from tests.kernels.every_kernel import MAKERS, cases
from tests.kernels.geometries import AWKWARD, geometry
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import DIRECTIONS, operands
from tests.simulated.small import NETWORKS, assert_agree, results, trainer

# In norm, beside the reference on the same (rounded) inputs in float64. TF32 rounds both factors to
# 2^-11; 16-bit results are rounded to 2^-12 and 2^-9, and more than once where rows are added up.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
TF32_TOLERANCE = 2e-3

DTYPES = list(TOLERANCE)


def make(tf32: bool) -> CudaBackend:
    try:
        backend = create_backend("cuda", tf32=tf32)
    except Unavailable as error:
        pytest.skip(str(error))
    assert isinstance(backend, CudaBackend)
    return backend


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaBackend]:
    """A GPU whose float32 is float32."""
    backend = make(tf32=False)
    yield backend
    backend.trim()


def rounded(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Float64 arrays with values that a type has."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return {name: array.astype(dtype).astype(np.float64) for name, array in arrays.items()}


def convolve(
    conv: Any, direction: str, arrays: dict[str, Any], shape: Any, empty: Any, **options: Any
) -> Any:
    """One direction into a new array."""
    x, w, b, dy = (arrays[name] for name in ("x", "w", "b", "dy"))
    out = empty({"forward": dy, "backward_data": x, "backward_filter": w}[direction].shape)
    if direction == "forward":
        conv.forward(x, w, b, shape, out=out, **options)
    elif direction == "backward_data":
        conv.backward_data(dy, w, shape, out=out, **options)
    else:
        conv.backward_filter(x, dy, shape, out=out, **options)
    return out


def check_convolutions(
    backend: CudaBackend, batch: int, shape: Any, arrays: Any, dtype: str, tolerance: float
) -> None:
    """Every direction with every algorithm agrees with the reference, twice with the same bytes."""
    exact = rounded(arrays, dtype)
    given = {name: backend.asarray(array, dtype) for name, array in exact.items()}
    for direction in DIRECTIONS:
        expected = convolve(ConvKernels(np), direction, exact, shape, np.empty)
        algorithms = [None, *backend.conv.algorithms(direction, shape, batch, given["x"].dtype)]
        for algorithm in algorithms if batch else [None]:
            results = [
                backend.to_numpy(
                    convolve(
                        *(backend.conv, direction, given, shape),
                        lambda size: backend.empty(size, dtype),
                        algorithm=algorithm,
                    )
                )
                for _ in range(2)
            ]
            what = f"{direction}: {algorithm}"
            assert_close(results[0].astype(np.float64), expected, tolerance, what)
            assert results[0].tobytes() == results[1].tobytes(), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", AWKWARD)
def test_convolutions_agree_with_the_reference_and_with_themselves(gpu, rng, case, dtype):
    batch, shape = AWKWARD[case]
    check_convolutions(gpu, batch, shape, operands(rng, batch, shape), dtype, TOLERANCE[dtype])


def test_convolutions_in_tf32_stay_within_its_rounding(rng):
    backend = make(tf32=True)
    for case in AWKWARD:
        batch, shape = AWKWARD[case]
        arrays = operands(rng, batch, shape)
        check_convolutions(backend, batch, shape, arrays, "float32", TF32_TOLERANCE)


def test_cudnn_has_algorithms_for_the_layers_of_a_resnet(gpu):
    for shape in (
        geometry((32, 32), 3, 16, (3, 3), padding=1),
        geometry((32, 32), 16, 16, (3, 3), padding=1),
        geometry((32, 32), 16, 32, (3, 3), 2, 1),
        geometry((56, 56), 64, 256, (1, 1)),
        geometry((224, 224), 3, 64, (7, 7), 2, 3),
    ):
        for direction in DIRECTIONS:
            for dtype in ("float32", "float16"):
                found = gpu.conv.algorithms(direction, shape, 64, np.dtype(dtype))
                assert len(found) > 1, f"cuDNN has nothing for {direction} {shape} {dtype}"


@pytest.mark.parametrize("kernel", [name for name in MAKERS if name.startswith("pool")])
def test_pooling_and_bins_agree_with_the_reference(gpu, rng, kernel):
    for dtype in DTYPES:
        for case in cases(kernel, rng):
            check(gpu, case, dtype)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("network", ["residual", "pooled"])
def test_every_step_of_a_model_agrees_with_the_reference(gpu, network, fuse):
    expected, value = (
        results(trainer(backend, NETWORKS[network], fuse=fuse, graph=False), epochs=1)
        for backend in ("numpy", gpu)
    )
    assert_agree(value, expected)

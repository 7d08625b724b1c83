"""The pooling kernels of the cuda backend, emulated on the host, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import PoolGeometry
from pydtnn.kernels.cuda import pool
from pydtnn.kernels.cuda.pool import CudaPool
from pydtnn.kernels.reference import PoolKernels
from tests.each import each
from tests.kernels.test_pool import GEOMETRIES
from tests.simulated.host import emulated_cupy, families, on_device
from tests.simulated.kernels import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

REFERENCE = PoolKernels(np)
CASES = {
    **GEOMETRIES,
    "padding beyond the kernel": PoolGeometry((4, 4), (2, 2), (1, 1), ((3, 3), (2, 3)), 3),
}

# In units of the largest value: means of up to 20 elements, added in another order.
TOLERANCE = {"float32": 1e-6, "float64": 1e-15, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture(scope="module")
def device() -> Any:
    return families().device


@pytest.fixture(params=["wide", "single"])
def family(
    request: pytest.FixtureRequest, device: Any, monkeypatch: pytest.MonkeyPatch
) -> CudaPool:
    """The family with its kernels emulated, which take several channels or one."""
    monkeypatch.setattr(pool, "MIN_BUSY_THREADS", 0 if request.param == "wide" else 1 << 60)
    return CudaPool(emulated_cupy(), device)


def blank(shape: tuple[int, ...], dtype: str) -> Any:
    """An array full of NaN."""
    return on_device(np.full(shape, np.nan, dtype))


@each("channels", [1, 3, 8])
@each("index_type", ["uint8", "int32"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_maxima_their_taps_and_means_are_those_of_the_reference(
    family, rng, name, dtype, channels, index_type
):
    g = replace(CASES[name], channels=channels)
    x = rng.integers(0, 4, (3, *g.size, channels)).astype(dtype)  # many ties
    shape, finite = (3, *g.output, channels), on_device(x.copy())
    x.ravel()[:: max(x.size // 5, 1)] = np.nan
    x.ravel()[1 :: max(x.size // 5, 2)] = -np.inf
    dy = on_device(rng.integers(-9, 9, shape).astype(dtype))  # sums are exact
    results = []
    for kernels in (family, REFERENCE):
        y, dx, mean, dmean = (blank(s, dtype) for s in (shape, x.shape) * 2)
        index = on_device(np.empty(shape, index_type))
        kernels.max_forward(on_device(x), g, out=y, index=index)
        kernels.max_backward(dy, index, g, out=dx)
        made, bins = [y, index, dx], blank((3, 3, 4, channels), dtype)
        kernels.adaptive_forward(finite, out=bins)
        kernels.adaptive_backward(on_device(np.ones(bins.shape, dtype)), out=dmean)
        made += [bins, dmean.copy()]
        for counted in (True, False) if name in GEOMETRIES else ():
            option: dict[str, Any] = {"count_padding": counted}
            kernels.average_forward(finite, g, out=mean, **option)
            kernels.average_backward(dy, g, out=dmean, **option)
            made += [mean.copy(), dmean.copy()]
        results.append([array.astype("float64") for array in made])
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        bound = 0 if i < 3 else 50 * TOLERANCE[dtype]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def test_more_images_than_blocks_are_taken_in_turns(family, rng, monkeypatch):
    monkeypatch.setattr(pool, "MAX_BLOCKS", 2)
    g = CASES["3x3 stride 2, padded"]
    x = on_device(rng.standard_normal((7, *g.size, 3)))
    shape = (7, *g.output, 3)
    y, expected = blank(shape, "float64"), blank(shape, "float64")
    index, expected_index = on_device(np.empty(shape, "uint8")), np.empty(shape, "uint8")
    family.max_forward(x, g, out=y, index=index)
    REFERENCE.max_forward(x, g, out=expected, index=expected_index)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(index, expected_index)

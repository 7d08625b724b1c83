"""What convolutions of the cuda backend do beyond the reference, on a GPU and a simulated one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda import Unavailable
from pydtnn.kernels.cuda.engine import Passing
from pydtnn.kernels.reference import ConvKernels
from tests.kernels.geometries import AWKWARD
from tests.kernels.guarded import assert_close
from tests.kernels.test_conv import operands
from tests.simulated import simulated_backend
from tests.simulated.backend import why_not

REFERENCE = ConvKernels(np)

# In norm, beside float64 on the same rounded inputs. Results are rounded once; the gradient of the
# filters is of 16 bits before it is converted; sums add up values that are rounded, or not yet.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
CASES = ["16 filters", "primes", "stride 2", "three groups", "depthwise", "first layer"]


TF32 = 2e-3
"""That of float32 where factors are rounded to 10 bits."""


def create(kind: str, *, tf32: bool) -> Any:
    if kind == "simulated":
        if reason := why_not():
            pytest.skip(reason)
        return simulated_backend(tf32=tf32, tuning="fixed")
    try:
        return create_backend("cuda", tf32=tf32, tuning="fixed")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["simulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """A backend whose float32 is float32."""
    return create(request.param, tf32=False)


@pytest.fixture(scope="module", params=["simulated", "cuda"])
def rounding_device(request: pytest.FixtureRequest) -> Any:
    """A backend that rounds float32 to TF32, as a user's does."""
    return create(request.param, tf32=True)


def to_float64(backend: Any, array: Any) -> np.ndarray:
    return backend.to_numpy(array).astype(np.float64)


def given(
    backend: Any, rng: np.random.Generator, case: str, dtype: str
) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """Operands on the device, the same in float64, and the geometry; biases are of float32."""
    kind: Any = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    batch, geometry = AWKWARD[case]
    host = {name: array.astype(kind) for name, array in operands(rng, batch, geometry).items()}
    host["b"] = rng.standard_normal(geometry.filters).astype(np.float32)
    on_device = {name: backend.asarray(array) for name, array in host.items()}
    return on_device, {name: a.astype(np.float64) for name, a in host.items()}, geometry


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_adds_gradients_in_place_those_of_16_bit_filters_to_float32(
    device, rng, case, dtype
):
    arrays, exact, geometry = given(device, rng, case, dtype)
    x, dy, w, conv = arrays["x"], arrays["dy"], arrays["w"], device.conv
    start = rng.standard_normal(geometry.weight_shape).astype(np.float32)
    want_x, want_w = np.empty_like(exact["x"]), start.astype(np.float64)
    REFERENCE.backward_data(exact["dy"], exact["w"], geometry, out=want_x, add=exact["x"])
    REFERENCE.backward_filter(exact["x"], exact["dy"], geometry, out=want_w, accumulate=True)
    for algorithm in conv.algorithms("backward_data", geometry, len(x), x.dtype):
        dx = device.empty(x.shape, x.dtype)
        dx[...] = x
        conv.backward_data(dy, w, geometry, out=dx, add=dx, algorithm=algorithm)
        assert_close(to_float64(device, dx), want_x, TOLERANCE[dtype])
    for algorithm in conv.algorithms("backward_filter", geometry, len(x), x.dtype):
        dw = device.asarray(start.copy())
        conv.backward_filter(x, dy, geometry, out=dw, accumulate=True, algorithm=algorithm)
        assert_close(to_float64(device, dw), want_w, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "passing", [(True, False, False), (True, True, False), (False, True, False)]
)
@pytest.mark.parametrize("case", CASES)
def test_biases_and_relu_in_passing_give_what_they_give_apart(
    rounding_device, rng, case, passing, dtype
):
    device = rounding_device
    arrays, exact, geometry = given(device, rng, case, dtype)
    x, w, y = arrays["x"], arrays["w"], arrays["dy"]
    engine, wanted = device.conv.passing, Passing(*passing)
    if not engine.plans("forward", geometry, len(x), dtype, passing=wanted):
        pytest.skip(f"cuDNN has no graph with {wanted} for {geometry} {dtype}")
    shift = arrays["b"] if wanted.shift else None
    engine.run_passing(x, w, geometry, out=y, shift=shift, relu=wanted.relu, sums=None)
    b = exact["b"] if wanted.shift else None
    expected = np.empty(y.shape)
    REFERENCE.forward(exact["x"], exact["w"], b, geometry, out=expected, relu=wanted.relu)
    assert_close(to_float64(device, y), expected, TF32 if dtype == "float32" else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_sums_in_passing_are_those_of_the_output(device, rng, case, dtype):
    arrays, exact, geometry = given(device, rng, case, dtype)
    x, w, y = arrays["x"], arrays["w"], arrays["dy"]
    engine = device.conv.passing
    shape, passing = (geometry, len(x)), Passing(sums=True)
    possible = engine.passes(*shape, x.dtype, passing)
    if not (possible and engine.plans("forward", *shape, dtype, passing=passing)):
        pytest.skip(f"cuDNN has no graph with sums for {geometry} {dtype}")
    sums, expected = device.zeros((1 + 2 * geometry.filters,), "float64"), np.empty(y.shape)
    engine.run_passing(x, w, geometry, out=y, shift=None, relu=False, sums=sums)
    expected_sums = np.empty(1 + 2 * geometry.filters)
    REFERENCE.forward(exact["x"], exact["w"], None, geometry, out=expected, sums=expected_sums)
    assert_close(to_float64(device, y), expected, TOLERANCE[dtype])
    found = to_float64(device, sums)
    assert found[0] == expected_sums[0]
    rows = expected_sums[0]
    deviation = np.sqrt(expected_sums[1 + geometry.filters :] / rows)
    first, second = found[1:].reshape(2, -1) / rows
    bound = TOLERANCE[dtype]
    assert (abs(first - expected_sums[1 : 1 + geometry.filters] / rows) <= bound * deviation).all()
    assert_close(second, deviation**2, 2 * bound)

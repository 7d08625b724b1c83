"""Whole models on the cuda backend, on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import (
    AvgPool2d,
    BatchNorm,
    Conv2d,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from tests.kernels.guarded import assert_close
from tests.simulated import simulated_backend, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}  # in norm, what the cuda backend promises
SHAPE, CLASSES, BATCH = (9, 9, 3), 5, 4


@pytest.fixture
def cuda() -> Backend:
    return simulated_backend()


def network() -> Sequential:
    """Every path of a convolution: uneven padding, groups, pointwise, norms, bias and ReLU."""
    body = Sequential(
        Conv2d(8, 3, padding=1, bias=False),
        BatchNorm(),
        ReLU(),
        Conv2d(8, 3, padding=1, bias=False),
        BatchNorm(),
    )
    return Sequential(
        Conv2d(8, 3, padding=((0, 1), (1, 0)), bias=False),
        BatchNorm(),
        ReLU(),
        Residual(body),
        ReLU(),
        MaxPool2d(2),
        Conv2d(8, 3, padding=1, groups=8),
        ReLU(),
        AvgPool2d(3, stride=1, padding=1),
        Conv2d(12, 1, bias=False),
        BatchNorm(),
        ReLU(),
        GlobalAvgPool2d(),
        Linear(CLASSES),
    )


def step(backend: Backend, x: np.ndarray, dy: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    """Outputs of inference and training, all gradients, and the statistics of one step."""
    model = Model(network(), SHAPE, backend=backend, input_gradient=True, **options)
    batch, dtype = backend.asarray(x, model.dtype), model.dtype
    inference, _ = model.forward(batch, StepContext(training=False), keep=False)
    y, residuals = model.forward(batch, StepContext(training=True))
    dx = model.backward(backend.asarray(dy, dtype), residuals)
    gradients = {name: p.grad for name, p in model.parameters.items()}
    arrays = {"inference": inference, "y": y, "dx": dx, **gradients, **model.statistics.state()}
    return {name: backend.to_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_agrees_with_the_reference(
    cuda: Backend, rng: np.random.Generator, dtype: str, fuse: bool
) -> None:
    x, dy = rng.standard_normal((BATCH, *SHAPE)), rng.standard_normal((BATCH, CLASSES))
    expected = step(create_backend("numpy"), x, dy, dtype="float64", fuse=fuse)
    value = step(cuda, x, dy, dtype=dtype, fuse=fuse)
    assert value.keys() == expected.keys()
    for name in expected:
        assert_close(value[name], expected[name], TOLERANCE[dtype])

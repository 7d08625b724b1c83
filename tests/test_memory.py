"""The forecast of a step's memory, against what NumPy allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.layers import (
    Add,
    BatchNorm,
    Branches,
    Concat,
    Dropout,
    Flatten,
    GroupNorm,
    Identity,
    LayerNorm,
    Linear,
    Net,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Sigmoid,
    StepContext,
)
from pydtnn.memory import Memory, forecast_memory
from pydtnn.model import Model
from pydtnn.models import resnet20

WIDTH = 1000


def measure(model: Model, batch: int) -> tuple[int, int]:
    """Bytes that a step keeps after forward, and at its peak, on top of the flat arrays."""
    context = StepContext(training=True, samples=np.arange(batch))

    def make_batch() -> np.ndarray:
        return np.full((batch, *model.input_shapes[0]), 0.5, model.dtype)

    def traced() -> tuple[int, int]:
        return tracemalloc.get_traced_memory()

    model.backward(*model.forward(make_batch(), context))  # fills caches
    tracemalloc.start()
    try:
        residuals = model.forward(make_batch(), context)[1]
        kept, _ = traced()
        del residuals
        tracemalloc.reset_peak()
        x = make_batch()
        y, residuals = model.forward(x, context)
        dy = np.ones_like(y)
        del y
        model.backward(dy, residuals)
        return kept, traced()[1]
    finally:
        tracemalloc.stop()


def forecast(model: Model, batch: int) -> tuple[int, int]:
    memory = forecast_memory(model, batch)
    return sum(memory.kept), memory.peak - memory.parameters - memory.gradients


def test_what_a_resnet_keeps_is_forecast_within_two_per_cent() -> None:
    model = Model(resnet20(10, (16, 16, 3)), (16, 16, 3), backend="numpy")
    kept, _ = measure(model, 8)
    # Python's own objects, a few hundred bytes a layer, are the difference
    assert forecast(model, 8)[0] == pytest.approx(kept, rel=0.02)


NETS: dict[str, Callable[[], Net]] = {
    "in place": lambda: Sequential(Linear(WIDTH), ReLU(), Linear(WIDTH), ReLU(), Linear(WIDTH)),
    "nothing in place": lambda: Sequential(Sigmoid(), Sigmoid(), Linear(WIDTH), Sigmoid()),
    "residual": lambda: Sequential(
        Linear(WIDTH), Residual(Sequential(Linear(WIDTH), ReLU(), Linear(WIDTH))), ReLU(), Linear(9)
    ),
    "views": lambda: Sequential(Linear(WIDTH), Identity(), Flatten(), Linear(WIDTH), Identity()),
    "branches": lambda: Sequential(
        Linear(WIDTH),
        Branches(Identity(), ReLU(), Linear(WIDTH), merge=Add()),
        Branches(Sigmoid(), ReLU(), merge=Concat()),
        Linear(WIDTH),
    ),
    "padding": lambda: Sequential(Linear(WIDTH), Pad(((100, 100),)), Linear(WIDTH)),
}


@pytest.mark.parametrize("name", NETS)
def test_what_is_kept_and_the_peak_are_forecast(name: str) -> None:
    model = Model(NETS[name](), (WIDTH,), backend="numpy")
    kept, peak = measure(model, 64)
    expected_kept, expected_peak = forecast(model, 64)
    array = 64 * WIDTH * model.dtype.itemsize
    assert expected_kept == pytest.approx(kept, abs=0.05 * array)
    # the reference kernels make dw, and up to two arrays in an activation, before they copy them
    scratch = max(p.grad.nbytes for p in model.parameters.values()) + 2 * array
    assert expected_peak - 0.05 * array <= peak <= expected_peak + scratch


@pytest.mark.parametrize("layer", [BatchNorm(), GroupNorm(4), LayerNorm(), Dropout(0.5)])
def test_small_arrays_of_norms_are_counted(layer: Net) -> None:
    model = Model(Sequential(Linear(8), layer, Linear(8)), (8,), backend="numpy")
    kept, _ = measure(model, 4000)
    assert forecast(model, 4000)[0] == pytest.approx(kept, rel=0.05)


def test_each_array_is_counted_once() -> None:
    net = Sequential(Linear(10), ReLU(), Residual(Linear(10)), Linear(10))
    memory = forecast_memory(Model(net, (10,), backend="numpy"), 4)
    row = 4 * 10 * 4
    # linear0 keeps the batch, relu1 its output (the residual's linear too), linear3 the sum
    assert memory.kept == (0, row, row, 0, 0, row)


def test_the_flat_arrays_are_counted_with_their_padding() -> None:
    memory = forecast_memory(Model(Linear(3), (5,), backend="numpy"), 2)
    assert isinstance(memory, Memory)
    assert memory.parameters == memory.gradients == 128  # 15 and 3 numbers, a line of 64 B each
    assert memory.peak == 256 + 2 * 5 * 4 + 2 * 2 * 3 * 4  # the batch, y and dy

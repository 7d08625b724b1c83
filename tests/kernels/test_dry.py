"""Passes on a backend without computation, in which arrays have no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers import (
    LSTM,
    Block,
    Embedding,
    Layer,
    Linear,
    MultiHeadAttention,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.model.memory import Forecast, Rehearsal, forecast_memory
from tests.each import each


class WithLengths(Block):
    """Attention over samples of different lengths."""

    def wire(self, graph: Any, *inputs: Any) -> Any:
        return graph.add(MultiHeadAttention(2), *inputs)


class Scaled(Layer):
    """Divides a batch by a number that it reads from it."""

    def __init__(self, read: Callable[[Any], Any], *, asks: bool = False) -> None:
        super().__init__()
        self.read, self.asks = read, asks

    def forward(self, *xs: Any, context: StepContext) -> Any:
        largest = abs(xs[0]).max()
        scale = 1.0 if self.asks and not self.backend.has_values else self.read(largest)
        return xs[0] / scale, scale

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy / saved


@pytest.mark.parametrize(
    ("net", "shapes"),
    [
        (Sequential(Embedding(9, 8), MultiHeadAttention(2), Linear(4)), ((6,),)),
        (WithLengths(), ((6, 8), (1,))),
    ],
    ids=["tokens", "lengths"],
)
def test_a_forecast_does_not_depend_on_what_memory_contains(net, shapes, monkeypatch):
    empty = Rehearsal.new_batch

    def garbage(self: Rehearsal) -> Any:
        batch = empty(self)
        for part in batch:
            part.fill(np.nan)
        return batch

    model = Model(net, shapes, recompute="auto")
    expected = Forecast(model, 5, 1, in_flight=2).memory(())
    monkeypatch.setattr(Rehearsal, "new_batch", garbage)
    assert Forecast(model, 5, 1, in_flight=2).memory(()) == expected
    assert model.find_cuts(5, in_flight=2)


READS: list[Callable[[Any], Any]] = [
    *(float, int, complex, bool),
    lambda x: x.item(),
    lambda x: x.tolist(),
    lambda x: 2.0 if x > 1 else 1.0,
    lambda x: float(x.reshape(1)[0]),
]


@each("read", READS)
def test_a_layer_that_reads_a_number_is_refused_in_a_forecast(read):
    layer = Scaled(read)
    model = Model(Sequential(Linear(3), layer), (2,))
    refusal = r"^(Scaled\.forward|<lambda>): expected a pass without access to values, .* test"
    with pytest.raises(ValueError, match=refusal):
        forecast_memory(model, 4)
    layer = Scaled(read, asks=True)
    assert forecast_memory(Model(Sequential(Linear(3), layer), (2,)), 4).peak > 0


def test_an_array_without_values_is_never_written():
    x = dry_backend(create_backend("cpu"), 1).empty((3,), "float32")
    before = x.view(np.ndarray).tobytes()
    x[...] = 7
    x[:2] += 1
    x += 1
    assert x.view(np.ndarray).tobytes() == before
    assert x.copy().shape == (3,)


@each(
    "function",
    [
        lambda x: np.sum(x, axis=1, keepdims=True),
        lambda x: np.max(x, axis=-1),
        lambda x: np.any(x, axis=0),
        lambda x: np.add.reduce(x, axis=0, dtype="float64"),
        lambda x: np.sum(x),
        lambda x: np.sum(x, axis=(0, 1)),
        lambda x: np.concatenate([x, x.astype("float64")], axis=-1),
        lambda x: np.concatenate([x, x], 1),
        lambda x: np.concatenate([x, x], axis=None),
        lambda x: x.swapaxes(0, 1).reshape(4, -1),
        lambda x: x[:, ::2].reshape((2, -1)),
    ],
)
def test_long_results_without_values_have_the_shape_and_type_of_those_with_values(function):
    x = dry_backend(create_backend("cpu"), 1).empty((6, 4, 50), "float32")
    found, expected = function(x), function(np.ones((6, 4, 50), "float32"))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_scratch_memory_is_that_of_all_families_on_the_cpu_but_for_16_bits():
    def scratch(*layers: Layer | Block, name: str = "cpu", dtype: str = "float32") -> int:
        backend = create_backend(name, **({"threads": 2} if name == "cpu" else {}))
        model = Model(Sequential(*layers), (9, 8), backend=backend, dtype=dtype)
        return forecast_memory(model, 4).scratch

    products = scratch(Linear(8))
    lstm, attention = scratch(LSTM(8)) - products, scratch(MultiHeadAttention(2)) - products
    assert min(lstm, attention) > 0
    assert scratch(LSTM(8), MultiHeadAttention(2)) == products + lstm + attention
    assert scratch(MultiHeadAttention(2), dtype="bfloat16") == 0
    assert scratch(MultiHeadAttention(2), name="numpy") == 0

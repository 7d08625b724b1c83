"""Backward in two halves has the bits of backward in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.kernels import create_backend
from pydtnn.layers import (
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    Net,
    ReLU,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.models.gpt import gpt
from pydtnn.models.vit import vit
from tests.each import each

IMAGE, TOKENS = (8, 8, 3), 11


class Doubled(Linear):
    """A subclass with a backward of its own, which has no halves."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, saved = super().forward(*xs, context=context)
        return 2 * y, saved

    def backward(self, dy: Any, saved: Any) -> Any:
        return super().backward(2 * dy, saved)


def convnet() -> Net:
    last = (Conv2d(6, 3, stride=2), ReLU(), Flatten(), Linear(4))
    return Sequential(Conv2d(4, 3, padding=1, groups=1), ReLU(), Dropout(0.2), *last)


def patches() -> Net:
    return vit(8, 2, 2, 4, IMAGE, patch=4)


def shared() -> Net:
    layer = Linear(5)
    return Sequential(layer, ReLU(), layer, Linear(3))


NETS: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "linear": (lambda: Linear(5), (7,)),
    "positions": (lambda: Linear(5, bias=False), (3, 7)),
    "conv": (lambda: Conv2d(4, 3, stride=2, padding=1), IMAGE),
    "groups": (lambda: Conv2d(6, 3, groups=3, bias=False), IMAGE),
    "own": (lambda: Sequential(Doubled(5), ReLU(), Linear(3)), (7,)),
    "shared": (shared, (5,)),
    "convnet": (convnet, IMAGE),
    "vit": (patches, IMAGE),
    "gpt": (lambda: gpt(TOKENS, (6,), depth=2, heads=2, width=8), (6,)),
}


def gradients(model: Model, halves: bool, accumulate: bool) -> list[np.ndarray]:
    """Compute two micro-batches, the second halves after both first ones."""
    rng = np.random.default_rng(3)
    shape, tokens = (3, *model.input_shapes[0]), model.graph.outputs[0].shape[-1] == TOKENS
    for buffer in model.buffers:
        buffer.grads[...] = 1
    left: list[list[Any]] = []
    dxs: list[Any] = []
    for m in range(2):
        x = rng.integers(0, TOKENS, shape) if tokens else rng.normal(size=shape)
        context = StepContext(training=True, samples=np.arange(3 * m, 3 * m + 3))
        y, saved = model.forward(x.astype(model.dtype), context)
        dy = rng.normal(size=y.shape).astype(model.dtype)
        add = accumulate or m > 0
        dxs += model.backward_shards([dy], [saved], accumulate=add, inputs_only=halves)
        left += [saved]
    for m, saved in enumerate(left if halves else []):
        model.backward_parameters(saved, accumulate=accumulate or m > 0)
    assert not any(value is not None for saved in left for value in saved)
    return [*(dx for dx in dxs if dx is not None), *(b.grads.copy() for b in model.buffers)]


@each("dtype", ["float64", "float32"])
@each("backend", ["numpy", "cpu"])
@each("fuse", [False, True])
@each("name", NETS)
def test_two_halves_have_the_bits_of_one_piece(
    name: str, fuse: bool, backend: str, dtype: str
) -> None:
    net, shape = NETS[name]
    device = create_backend(backend, threads=1, tuning="fixed")
    options: dict[str, Any] = {"input_gradient": name != "gpt", "fuse": fuse}
    model = Model(net(), shape, backend=device, dtype=dtype, **options)
    for accumulate in (False, True):
        whole = gradients(model, False, accumulate)
        halves = gradients(model, True, accumulate)
        for own, expected in zip(halves, whole, strict=True):
            np.testing.assert_array_equal(own, expected)


def test_layers_in_one_piece_leave_nothing_and_others_what_they_need() -> None:
    model = Model(Sequential(Doubled(5), Linear(3)), (7,), dtype="float64")
    x = np.ones((2, 7))
    y, saved = model.forward(x, StepContext(training=True))
    model.backward_shards([y], [saved], inputs_only=True)
    assert [left is None for left in saved] == [True, True, False]
    assert Doubled.backward_inputs is Layer.backward_inputs
    assert Linear.backward_inputs is not Layer.backward_inputs


def test_a_frozen_layer_keeps_nothing_for_the_second_half() -> None:
    model = Model(Sequential(Linear(5, name="a"), Linear(3, name="b")), (7,), dtype="float64")
    model.freeze("b")
    y, saved = model.forward(np.ones((2, 7)), StepContext(training=True))
    model.backward_shards([y], [saved], inputs_only=True)
    assert [left is None for left in saved] == [True, False, True]

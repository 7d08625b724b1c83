"""Backward in two halves has the bits of backward in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.kernels import create_backend
from pydtnn.layers import Conv2d, Linear, Net, ReLU, Sequential, StepContext
from pydtnn.model import Model
from pydtnn.models.gpt import gpt
from pydtnn.models.vit import vit
from tests.each import each
from tests.model.networks import IMAGE, NETS

TOKENS = 11


class Doubled(Linear):
    """A subclass with a backward of its own, which has no halves."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, saved = super().forward(*xs, context=context)
        return 2 * y, saved

    def backward(self, dy: Any, saved: Any) -> Any:
        return super().backward(2 * dy, saved)


def patches() -> Net:
    return vit(8, 2, 2, 4, (8, 8, 3), patch=4)


OWN: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "positions": (lambda: Linear(5, bias=False), (3, 7)),
    "groups": (lambda: Conv2d(6, 3, groups=3, bias=False), IMAGE),
    "own": (lambda: Sequential(Doubled(5), ReLU(), Linear(3)), (7,)),
    "vit": (patches, (8, 8, 3)),
    "gpt": (lambda: gpt(TOKENS, (6,), depth=2, heads=2, width=8), (6,)),
}
SOME = ("projection", "pooled branches", "shared", "undeclared", "biased convolution and norm")
ALL = OWN | {name: (NETS[name], IMAGE) for name in SOME}


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
        ys = y if isinstance(y, tuple) else (y,)
        dys = tuple(rng.normal(size=part.shape).astype(model.dtype) for part in ys)
        add = accumulate or m > 0
        dxs += model.backward_shards([dys], [saved], accumulate=add, inputs_only=halves)
        left += [saved]
    for m, saved in enumerate(left if halves else []):
        model.backward_parameters(saved, accumulate=accumulate or m > 0)
    assert not any(value is not None for saved in left for value in saved)
    return [*(dx for dx in dxs if dx is not None), *(b.grads.copy() for b in model.buffers)]


@each("backend", ["numpy", "cpu"])
@each("fuse", [False, True])
@each("name", ALL)
def test_two_halves_have_the_bits_of_one_piece(name, fuse, backend):
    net, shape = ALL[name]
    device = create_backend(backend, threads=1, tuning="fixed")
    options: dict[str, Any] = {"input_gradient": name != "gpt", "fuse": fuse}
    model = Model(net(), shape, backend=device, dtype="float32", **options)
    for accumulate in (False, True):
        whole = gradients(model, False, accumulate)
        halves = gradients(model, True, accumulate)
        for own, expected in zip(halves, whole, strict=True):
            np.testing.assert_array_equal(own, expected)


@each(("frozen", "empty"), [((), [True, True, False]), (("b",), [True, True, True])])
def test_layers_keep_for_the_second_half_what_it_needs(frozen, empty):
    model = Model(Sequential(Doubled(5), Linear(3, name="b")), (7,), dtype="float64")
    if frozen:
        model.freeze(*frozen)
    y, saved = model.forward(np.ones((2, 7)), StepContext(training=True))
    model.backward_shards([y], [saved], inputs_only=True)
    assert [left is None for left in saved] == empty  # Doubled has one half only

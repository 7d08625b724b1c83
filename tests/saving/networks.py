"""Networks to save: a custom block, which needs no code, and custom layers, which do."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    ReLU,
    Residual,
    Sequential,
    Slice,
    Tanh,
)
from pydtnn.model import Model


class Scale(Layer):
    """A layer that is not in the library."""

    def __init__(self, factor: float, *rest: Any, gate: Layer | None = None, **more: Any) -> None:
        super().__init__()
        self.factor, self.rest, self.gate, self.more = factor, rest, gate, more

    def build(self, *shapes: Any) -> Any:
        self.w = self.parameter("w", shapes[0][-1:], "ones")
        return shapes[0]

    def forward(self, *xs: Any, context: Any) -> Any:
        return xs[0] * self.w.value * self.factor, xs[0]

    def backward(self, dy: Any, saved: Any) -> Any:
        self.w.store_grad((dy * saved * self.factor).sum(axis=tuple(range(dy.ndim - 1))))
        return dy * self.w.value * self.factor


class Parts(Block):
    """A custom block with two inputs, two outputs and a layer that is used twice."""

    def wire(self, graph: Any, *inputs: Any) -> Any:
        image, numbers = inputs
        seen = graph.add(
            Sequential(Conv2d(3, 3), BatchNorm(), ReLU(), Flatten(), name="look"), image
        )
        shared = Linear(6, name="shared")
        first = graph.add(shared, numbers)
        second = graph.add(shared, graph.add(Tanh(name="tanh"), numbers))
        both = graph.add(Concat(name="both"), seen, graph.add(Add(name="sum"), first, second))
        return graph.add(Linear(3, name="kind"), both), graph.add(Linear(1, name="size"), both)


def two(dtype: str = "float32") -> Model:
    return Model(Parts(), ((4, 4, 2), (5,)), dtype=dtype, seed=3)


def residual(dtype: str = "float32", *, fuse: bool = True, backend: str = "cpu") -> Model:
    body = Sequential(Conv2d(4, 3, padding="same"), BatchNorm(), ReLU(), Conv2d(4, 3, padding=1))
    net = Sequential(
        Conv2d(4, (3, 1), padding=((1, 1), (0, 0)), initializer=np.zeros_like),
        BatchNorm(epsilon=1e-3),
        ReLU(),
        Residual(body),
        Dropout(0.2),
        Slice(slice(0, 4), slice(None, None, 2)),
        Flatten(),
        Linear(3, name="head"),
    )
    net.parts[0].initializer = "he_normal"  # type: ignore[attr-defined]  # as saved: a function
    model = Model(net, (6, 6, 1), dtype=dtype, fuse=fuse, backend=backend, seed=1)
    model.statistics.running[:] = 0.5
    return model


def scaled() -> Model:
    gate = Linear(2, bias=False)
    more = {"list": [1, 2.5, None], "pair": (True, "a"), "infinite": float("inf")}
    scale = Scale(0.5, np.int64(3), np.float32(0.25), gate=gate, **more)
    return Model(Sequential(scale, Linear(2)), (4,), backend="numpy")

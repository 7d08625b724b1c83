"""A model that recomputes values in backward: the same bytes, with less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Residual,
    Sequential,
    Sigmoid,
    StepContext,
    Tanh,
)
from pydtnn.layers.blocks import Graph
from pydtnn.layers.node import Node
from pydtnn.model import Model

IMAGE = (9, 7, 3)


def block(filters: int, stride: int = 1) -> Net:
    body = Sequential(
        Conv2d(filters, 3, padding=1, stride=stride, bias=False),
        BatchNorm(),
        ReLU(),
        Conv2d(filters, 3, padding=1, bias=False),
        BatchNorm(),
    )
    if stride == 1:
        return Sequential(Residual(body), ReLU())
    by = Sequential(Conv2d(filters, 1, stride=stride, bias=False), BatchNorm())
    return Sequential(Residual(body, by), ReLU())


def chain() -> Net:
    return Sequential(
        Conv2d(4, 3), Tanh(), Conv2d(4, 3), ReLU(), Flatten(), Linear(6), Sigmoid(), Linear(3)
    )


def residual() -> Net:
    return Sequential(
        Conv2d(16, 3, padding=1),
        BatchNorm(),
        ReLU(),
        *(block(16) for _ in range(3)),
        block(20, stride=2),
        block(20),
        Dropout(0.3),
        GlobalAvgPool2d(),
        Linear(3),
    )


def branches() -> Net:
    return Sequential(
        Conv2d(6, 5, stride=2, padding=2),
        Branches(
            Sequential(Conv2d(4, 3, padding=1), BatchNorm(), ReLU()),
            Sequential(MaxPool2d(3, stride=1, padding=1), Dropout(0.5)),
            Sequential(Conv2d(2, 1), Sigmoid()),
            merge=Concat(),
        ),
        BatchNorm(),
        Conv2d(4, 3, dilation=2, padding=2),
        Flatten(),
        Linear(3),
    )


class Shared(Block):
    """A layer used three times, an input read late, and two outputs, one of them early."""

    def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
        conv, norm = Conv2d(3, 3, padding=1), BatchNorm()
        (x,) = inputs
        first = graph.add(norm, graph.add(conv, x))
        second = graph.add(norm, graph.add(conv, graph.add(Tanh(), first)))
        third = graph.add(conv, graph.add(ReLU(), second))
        end = graph.add(Add(), graph.add(Add(), third, first), x)
        return second, graph.add(Linear(3), graph.add(Flatten(), end))


NETS: dict[str, Callable[[], Net]] = {
    "chain": chain,
    "residual": residual,
    "branches": branches,
    "shared": Shared,
}


def model_of(net: Net, *, threads: int = 1, **options: Any) -> Model:
    backend = create_backend("cpu", threads=threads, tuning="fixed")
    return Model(net, IMAGE, backend=backend, **options)


def step(model: Model, *, batch: int = 5, accumulate: bool = False) -> dict[str, bytes]:
    """All that a forward and a backward pass compute, as bytes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *model.input_shapes[0])).astype(model.dtype)
    y, saved = model.forward(x, StepContext(training=True, seed=3, samples=np.arange(batch)))
    ys = y if isinstance(y, tuple) else (y,)
    dys = tuple(rng.normal(size=part.shape).astype(part.dtype) for part in ys)
    dx = model.backward(dys, saved, accumulate=accumulate)
    seen = {name: p.grad for name, p in model.parameters.items() if not p.frozen}
    seen |= {f"y{i}": part for i, part in enumerate(ys)} | {"sums": model.statistics.sums}
    return {name: array.tobytes() for name, array in seen.items()} | (
        {} if dx is None else {"dx": dx.tobytes()}
    )


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"dtype": "float64", "threads": 2}])
@pytest.mark.parametrize("name", NETS)
def test_every_way_to_recompute_gives_the_same_bytes(name: str, options: dict[str, Any]) -> None:
    model = model_of(NETS[name](), input_gradient=True, **options)
    expected, again = step(model), step(model, accumulate=True)
    first, nodes = 1, len(model.graph.nodes)
    rng = np.random.default_rng(1)
    places = np.arange(first + 1, nodes)
    ways = [places, places[-1:], *(places[rng.random(len(places)) < 0.3] for _ in range(6))]
    for cuts in ways:
        model.statistics.begin_step()
        model.cut([first, *map(int, cuts)])
        assert step(model) == expected
        assert step(model, accumulate=True) == again

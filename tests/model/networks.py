"""Networks that models compute in several ways, and what a step of one computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool2d,
    Identity,
    Layer,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    ReLU6,
    Reshape,
    Residual,
    Sequential,
    Sigmoid,
    SiLU,
    StepContext,
    Tanh,
)
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.graph import Graph

IMAGE = (8, 6, 3)

conv = partial(Conv2d, kernel_size=3, padding=1)


def unit(filters: int, stride: int = 1, bias: bool = False) -> list[Layer]:
    return [conv(filters, stride=stride, bias=bias), BatchNorm(), ReLU()]


def residual() -> Net:
    body = [*unit(4), conv(4, bias=False), BatchNorm()]
    return Sequential(*unit(4), Residual(Sequential(*body)), ReLU(), conv(5))


def projection() -> Net:
    body = Sequential(*unit(6, stride=2), conv(6), BatchNorm())
    shortcut = Sequential(Conv2d(6, 1, stride=2), BatchNorm())
    blocks = (Residual(body, shortcut=shortcut), ReLU(), Residual(Sequential(*unit(6), conv(6))))
    return Sequential(*unit(4), *blocks, ReLU(), Dropout(0.3), GlobalAvgPool2d(), Linear(3))


def preactivation() -> Net:
    def body() -> Net:
        return Sequential(BatchNorm(), ReLU(), conv(4), BatchNorm(), ReLU(), conv(4))

    return Sequential(conv(4), Residual(body()), Residual(body()), BatchNorm(), ReLU(), Flatten())


def dense() -> Net:
    def layer() -> Branches:
        return Branches(Identity(), Sequential(BatchNorm(), ReLU(), conv(2)), merge=Concat())

    return Sequential(conv(3), layer(), layer(), BatchNorm(), ReLU(), GlobalAvgPool2d())


def pooled() -> Net:
    branches = Branches(
        Sequential(*unit(4)),
        Sequential(MaxPool2d(3, stride=1, padding=1), Dropout(0.5)),
        Sequential(Conv2d(2, 1), Sigmoid()),
        merge=Concat(),
    )
    return Sequential(conv(6, stride=2), branches, BatchNorm(), conv(4), Flatten(), Linear(3))


class Wired(Block):
    """A block made of a function."""

    def __init__(self, wire: Callable[..., Any]) -> None:
        self.function = wire

    def wire(self, graph: Graph, *inputs: Node) -> Any:
        return self.function(graph, *inputs)


def late_source(graph: Graph, x: Node) -> Node:
    """The other input of the addition is made, and read, after the normalised convolution."""
    normed = graph.add(BatchNorm(name="n"), graph.add(conv(4, name="a"), x))
    plain = graph.add(conv(4, name="b"), x)
    other = graph.add(conv(4, name="c"), plain)
    total = graph.add(ReLU(name="r"), graph.add(Add(name="s"), normed, plain))
    return graph.add(Add(name="t"), graph.add(conv(4, name="d"), total), other)


def several_readers(graph: Graph, x: Node) -> tuple[Node, ...]:
    """A ReLU read by two convolutions, a pooling and the outside."""
    y = graph.add(Sequential(*unit(4), name="u"), x)
    first = graph.add(conv(4, name="a"), y)
    second = graph.add(Sequential(conv(4), BatchNorm(), name="b"), y)
    merged = graph.add(Add(name="s"), first, second)
    pool = graph.add(MaxPool2d(3, stride=1, padding=1, name="p"), y)
    return graph.add(Add(name="t"), merged, pool), y


def output_before_norm(graph: Graph, x: Node) -> tuple[Node, ...]:
    """A convolution that is an output and is read by a batch norm."""
    y = graph.add(conv(4, name="a"), x)
    return graph.add(Sequential(BatchNorm(), ReLU(), name="n"), y), y


def shared(graph: Graph, x: Node) -> tuple[Node, ...]:
    """A layer used three times, an input read late, and two outputs, one of them early."""
    layer, norm = conv(3), BatchNorm()
    first = graph.add(norm, graph.add(layer, x))
    second = graph.add(norm, graph.add(layer, graph.add(Tanh(), first)))
    third = graph.add(layer, graph.add(ReLU(), second))
    end = graph.add(Add(), graph.add(Add(), third, first), x)
    return second, graph.add(Linear(3), graph.add(Flatten(), end))


def doubled(graph: Graph, x: Node) -> Node:
    """An array that is merged with itself."""
    x = graph.add(Sequential(conv(3), ReLU()), x)
    x = graph.add(ReLU(), graph.add(Add(), x, x))
    return graph.add(BatchNorm(), graph.add(Concat(), x, x, x))


class Scaled(BatchNorm):
    """A user's layer that changes what batch norm computes."""

    def forward(self, *xs: Any, context: StepContext, total: Any = None) -> tuple[Any, Any]:
        y, saved = super().forward(*xs, context=context, total=total)
        return 2 * y, saved

    def backward_sums(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return super().backward_sums(2 * dy, saved)


class PassesDy(Layer):
    """Identity of a user who declares nothing, and returns dy itself and the input itself."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


class Transposed(Layer):
    """Swaps axes, so that arrays are not in C order, and multiplies by a 64-bit number."""

    def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (h, w, c) = self.single(shapes)
        return w, h, c

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0].swapaxes(1, 2) * np.float64(2), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy.swapaxes(1, 2) * np.float64(2)


class Spread(Layer):
    """The mean over each image; its gradient is one number seen from everywhere, read-only."""

    def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return self.single(shapes)[-1:]

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0].mean(axis=(1, 2)), None

    def backward(self, dy: Any, saved: Any) -> Any:
        h, w, c = self.input_shapes[0]
        return np.broadcast_to(dy[:, None, None] / (h * w), (len(dy), h, w, c))


def undeclared() -> Net:
    """Layers that declare nothing."""
    body = Residual(Sequential(PassesDy(), ReLU()))
    turned = (Transposed(), conv(3), BatchNorm(), Transposed(), ReLU(), conv(3), ReLU())
    first = (conv(3), PassesDy(), ReLU(), PassesDy(), body, conv(3), ReLU())
    return Sequential(*first, *turned, Spread(), ReLU(), Linear(2))


def views() -> Net:
    drops = (Identity(), Dropout(0.4), ReLU(), Dropout(0.4), Dropout(0.0), MaxPool2d(2))
    ends = (Flatten(), Identity(), ReLU(), Linear(6), Dropout(0.3), ReLU(), Linear(2))
    return Sequential(conv(3), *drops, *ends)


def views_beside_others() -> Net:
    readers = (conv(3), Identity(), Residual(ReLU()), Identity(), Residual(Tanh()))
    reshaped = Branches(Sequential(Identity(), ReLU()), Reshape(IMAGE), merge=Add())
    passed = Branches(Sequential(PassesDy(), ReLU()), Tanh(), merge=Add())
    return Sequential(Identity(), ReLU(), *readers, conv(3), reshaped, passed, BatchNorm())


def activations() -> Net:
    """Activations and norms that branches share."""
    norm = Sequential(BatchNorm(), ReLU())
    sums = (Residual(Sequential(ReLU(), Tanh())), Residual(ReLU()), ReLU(), conv(3))
    return Sequential(conv(3), Branches(ReLU(), Identity(), norm, Tanh(), merge=Add()), *sums)


NETS: dict[str, Callable[[], Net]] = {
    "residual": residual,
    "projection": projection,
    "preactivation": preactivation,
    "dense": dense,
    "pooled branches": pooled,
    "late source": lambda: Wired(late_source),
    "several readers": lambda: Wired(several_readers),
    "an output before a norm": lambda: Wired(output_before_norm),
    "shared": lambda: Wired(shared),
    "an array with itself": lambda: Wired(doubled),
    "undeclared": undeclared,
    "views": views,
    "views beside others": views_beside_others,
    "activations": activations,
    "subclasses": lambda: Sequential(conv(4), Scaled(), conv(4), Scaled(), Flatten(), Linear(2)),
    "norm alone": lambda: Sequential(Flatten(), BatchNorm()),
    "norm of a linear layer": lambda: Sequential(Flatten(), Linear(5), BatchNorm(), ReLU()),
    "biased convolution and norm": lambda: Sequential(*unit(4, bias=True), *unit(3, bias=True)),
    "norm without ReLU": lambda: Sequential(conv(4), BatchNorm(), conv(3), BatchNorm(), SiLU()),
    "norm and ReLU6": lambda: Sequential(
        *(conv(4), BatchNorm(), ReLU6(), conv(3), ReLU6(), conv(2), ReLU6(), MaxPool2d(2))
    ),
    "norm of norm": lambda: Sequential(conv(4), BatchNorm(), BatchNorm(), ReLU(), ReLU()),
    "ReLU between convolutions": lambda: Sequential(conv(4), ReLU(), conv(3), ReLU(), MaxPool2d(2)),
    "ReLU then dropout": lambda: Sequential(*unit(4), Dropout(0.5), conv(2)),
    "ReLU before a norm": lambda: Sequential(conv(4), ReLU(), BatchNorm(), ReLU(), conv(2)),
    "ReLU before a norm alone": lambda: Sequential(conv(4), ReLU(), BatchNorm(), conv(2)),
    "ReLU before two norms": lambda: Sequential(
        conv(4, bias=False), ReLU(), Residual(BatchNorm(), BatchNorm()), ReLU()
    ),
    "ReLU first": lambda: Sequential(ReLU(), conv(2), ReLU()),
    "residual of one convolution": lambda: Sequential(
        *unit(4), Residual(Sequential(conv(4), BatchNorm())), ReLU(), conv(2)
    ),
    "sum of three": lambda: Branches(conv(2), Sequential(*unit(2)), conv(2), merge=Add()),
    "strides and groups": lambda: Sequential(
        *unit(4, stride=2), Conv2d(4, 3, groups=4, padding=2, dilation=2), BatchNorm(), ReLU()
    ),
}


def passes(
    model: Model,
    *,
    training: bool = True,
    batch: int = 3,
    micro_batches: int = 1,
    accumulate: bool = False,
) -> dict[str, np.ndarray]:
    """Outputs, gradients and sums of one step by name; what a model is given must stay."""
    rng, backend = np.random.default_rng(2), model.backend
    context = StepContext(training=training, seed=3, samples=np.arange(batch))
    found: dict[str, Any] = {}
    others = model.input_shapes[1:]  # of tokens
    for i in range(micro_batches):
        x = backend.asarray(rng.normal(size=(batch, *model.input_shapes[0])), model.dtype)
        if any(isinstance(layer, Embedding) for layer in model.layers):
            x = backend.asarray(rng.integers(11, size=x.shape), model.dtype)
        given = {"x": x, "x before": x.copy()}
        more = [backend.asarray(rng.integers(11, size=(batch, *s)), model.dtype) for s in others]
        y, residuals = model.forward((x, *more) if more else x, context)
        assert (x == given["x before"]).all()
        ys = y if isinstance(y, tuple) else (y,)
        dys = tuple(backend.asarray(rng.normal(size=part.shape), part.dtype) for part in ys)
        given |= {f"y{j}": part for j, part in enumerate(ys)}
        given |= {f"dy{j}": part for j, part in enumerate(dys)}
        before = {name: array.copy() for name, array in given.items()}
        dx = model.backward(dys, residuals, accumulate=accumulate or i > 0)
        found["dx"] = None if isinstance(dx, tuple) else dx  # tokens have no gradients
        assert all((array == before[name]).all() for name, array in given.items())
        found |= {name: array for name, array in before.items() if name.startswith("y")}
    found |= {f"grad {name}": p.grad for name, p in model.parameters.items() if not p.frozen}
    found["sums"] = model.statistics.sums
    return {
        name: backend.to_numpy(array).copy() for name, array in found.items() if array is not None
    }


def assert_same(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 0.0
) -> None:
    """The same bytes, or a tolerance relative to each array, or to all gradients."""
    assert found.keys() == expected.keys()
    gradients = (array for name, array in expected.items() if name.startswith("grad"))
    scale = max((np.abs(array).max(initial=0) for array in gradients), default=0)
    for name, array in expected.items():
        if not tolerance:
            assert found[name].tobytes() == array.tobytes(), name
            continue
        own = np.abs(array).max(initial=0)
        allowed = tolerance * max(own, scale if name.startswith("grad") else own)
        assert np.abs(found[name] - array).max(initial=0) <= allowed, name

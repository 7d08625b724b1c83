"""A model that recomputes values in backward: the same bytes, with less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
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
    Layer,
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
from pydtnn.layers.collectives import Pending, Steps, Sum
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.execution import CollectiveCall
from pydtnn.model.memory import Forecast, forecast_memory
from pydtnn.models import create_net
from tests.each import each

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


@each("options", [{}, {"fuse": False}, {"dtype": "float64", "threads": 2}])
@each("name", NETS)
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


class Scaled(BatchNorm):
    """A user's layer that changes what batch norm computes."""

    def forward(self, *xs: Any, context: StepContext, total: Any = None) -> tuple[Any, Any]:
        y, saved = super().forward(*xs, context=context, total=total)
        return 2 * y, saved

    def backward_sums(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        return super().backward_sums(2 * dy, saved)


class Asking(Communicating, Layer):
    """A layer that adds up its output over ranks."""

    def communicates(self, *, training: bool, joint: bool) -> bool:
        return True

    def forward(self, *xs: Any, context: StepContext) -> tuple[Any, None]:
        raise NotImplementedError

    def backward(self, dy: Any, saved: None) -> Any:
        raise NotImplementedError

    def forward_steps(self, *xs: Any, context: StepContext, joint: bool) -> Steps:
        total = (yield Sum(xs[0].reshape(-1), ("filter",))).wait()
        return total.reshape(xs[0].shape), None

    def backward_steps(self, dy: Any, saved: None, *, joint: bool) -> Steps:
        return (yield Sum(dy.reshape(-1), ("filter",))).wait().reshape(dy.shape)


def test_a_subclass_of_batch_norm_is_repeated_as_it_is() -> None:
    net = Sequential(Conv2d(4, 3), Scaled(), Conv2d(4, 3), Scaled(), Flatten(), Linear(2))
    model = model_of(net)
    expected = step(model)
    model.statistics.begin_step()
    model.cut((1, 3, 5))
    assert step(model) == expected


@each("fuse", [True, False])
def test_exchanges_are_repeated_and_sums_of_batch_norm_are_not(fuse: bool) -> None:
    asked_by: list[str] = []

    def communicate(calls: Sequence[CollectiveCall]) -> list[Pending]:
        asked_by.append(calls[0][0].name)
        arrays = [op.array for _, op in calls if isinstance(op, Sum)]
        if asked_by[-1] == "asking":  # of two ranks with equal arrays
            return [Pending(None, partial(np.multiply, 2, array)) for array in arrays]
        total = sum(arrays[1:], arrays[0])
        return [Pending(None, lambda: total)] * len(calls)

    net = Sequential(
        Conv2d(4, 3, name="conv"),
        BatchNorm(name="norm"),
        ReLU(),
        Asking(name="asking"),
        Conv2d(4, 3),
        Flatten(),
        Linear(2),
    )
    model = model_of(net, fuse=fuse)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, *IMAGE)).astype("float32") for n in (3, 2)]
    contexts = [StepContext(training=True, samples=np.arange(len(x))) for x in xs]

    def run() -> list[bytes]:
        asked_by.clear()
        model.statistics.begin_step()
        done = model.forward_shards(xs, contexts, communicate=communicate, joint=True)
        model.backward_shards(
            [np.ones_like(y) for y, _ in done],
            [saved for _, saved in done],
            communicate=communicate,
            joint=True,
        )
        return [model.statistics.sums.tobytes(), *(b.grads.tobytes() for b in model.buckets)]

    expected = run()
    assert asked_by == ["norm", "asking", "asking", "norm"]
    model.cut((1, [node.name for node in model.graph.nodes].index("asking") + 1))
    assert run() == expected
    assert asked_by == ["norm", "asking", "asking", "asking", "norm"]


def test_frozen_layers_at_the_beginning_do_not_run_again() -> None:
    model = model_of(residual(), recompute=4)
    whole = model.segments
    model.freeze("conv2d0", "batchnorm1", "sequential3")
    first = min(model.graph.trained)
    assert model.cuts[0] == first > 1
    assert whole is not model.segments
    got = step(model)
    model.cut(())
    model.statistics.begin_step()
    assert step(model) == got


def test_a_pass_for_inference_keeps_and_repeats_nothing() -> None:
    model = model_of(residual(), recompute=3)
    x = np.ones((2, *IMAGE), "float32")
    expected = model_of(residual()).predict(x)
    np.testing.assert_array_equal(model.predict(x), expected)
    with_gradient = StepContext(training=False)
    y, saved = model.forward(x, with_gradient)
    model.backward(np.ones_like(y), saved)
    gradients = [p.grad.copy() for p in model.parameters.values()]
    model.cut(())
    y, saved = model.forward(x, with_gradient)
    model.backward(np.ones_like(y), saved)
    for p, gradient in zip(model.parameters.values(), gradients, strict=True):
        np.testing.assert_array_equal(p.grad, gradient)


def names_before_cuts(model: Model) -> list[str]:
    return [model.graph.nodes[cut - 1].name for cut in model.cuts[1:]]


def test_checkpoints_are_the_ends_of_named_layers_and_blocks() -> None:
    net = create_net("resnet20", 10, (32, 32, 3))
    ends = [f"stage{s}.{b}.bn2" for s in (1, 2, 3) for b in (0, 1, 2)]
    ends[-1] = "stage3.2.conv2"  # its batch norm is computed by the only reader
    for names in (["stage?.?"], ["stage1.*", "stage2.*", "stage3"], ["stage*.relu"]):
        model = Model(net, (32, 32, 3), recompute=names)
        net = create_net("resnet20", 10, (32, 32, 3))
        chosen = names_before_cuts(model)
        assert chosen == (ends if "stage3" not in names else [*ends[:6], ends[-1]])
    model = Model(net, (32, 32, 3), recompute="stage1.0.relu1")
    assert names_before_cuts(model) == ["stage1.0.conv1"]
    vgg = Model(create_net("vgg11", 10, (32, 32, 3)), (32, 32, 3), recompute=["*relu1"])
    assert len(vgg.cuts) >= 2


@each("name", ["residual", "branches", "chain"])
def test_parts_save_about_equally_many_bytes(name: str) -> None:
    model = model_of(NETS[name](), recompute=3)
    assert len(model.segments.parts) == 2
    kept = forecast_memory(model, 32, cuts=()).kept
    bounds = [*model.cuts, len(kept)]
    parts = [sum(kept[a:b]) for a, b in pairwise(bounds)]
    assert max(parts) <= sum(kept) / 3 + 2 * max(kept)


def test_auto_needs_the_least_memory_or_the_least_computation_within_the_limit() -> None:
    keeping, model = (
        Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute=way)
        for way in (None, "auto")
    )
    whole, least = (forecast_memory(m, 32, slots=1) for m in (keeping, model))
    assert least.peak < 0.6 * whole.peak
    ends = [model.cuts[-1]]
    for share in (0.75, 0.9, 1.0):
        model.memory_limit = int(share * whole.resident)
        model.choose_segments(32, slots=1)
        assert forecast_memory(model, 32, slots=1).resident <= model.memory_limit
        ends.append(model.cuts[-1] if model.cuts else 0)
    assert ends == sorted(ends, reverse=True)
    assert len(set(ends)) == len(ends)
    assert ends[-1] == 0


def test_the_least_memory_is_named_and_is_possible() -> None:
    model = Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute="auto")
    model.memory_limit = 1
    with pytest.raises(ValueError, match="memory_limit must be at least .* for 8 samples") as error:
        model.choose_segments(8)
    least = int(str(error.value).split()[6].replace(",", ""))
    model.memory_limit = least
    model.choose_segments(8)
    assert forecast_memory(model, 8).resident == least
    model.memory_limit = least - 1
    with pytest.raises(ValueError, match=f"{least:,} B"):
        model.choose_segments(8)


@each(
    ("arguments", "message"),
    [
        ({"recompute": "conv9"}, "Model.recompute: unknown layer 'conv9'; did you mean 'conv2d"),
        ({"recompute": 1}, "Model: recompute must be at least 2, got 1"),
        ({"recompute": 99}, "Model: recompute must be at most 7, the parts into which this"),
        ({"recompute": []}, "Model: recompute must be a number of parts, names"),
        ({"recompute": 2.5}, "Model: recompute must be a number of parts, names"),
        ({"recompute": "linear7"}, "Model.recompute: linear7 is the end of the network"),
        ({"recompute": 2, "memory_limit": 5}, 'Model: memory_limit requires recompute="auto"'),
        ({"recompute": "auto", "memory_limit": 0}, "Model: memory_limit must be at least 1"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        Model(chain(), IMAGE, **arguments)
    assert message in str(error.value)


def test_the_summary_shows_what_is_recomputed() -> None:
    lines = Model(chain(), IMAGE, recompute=["tanh1", "relu3"]).summary(4).splitlines()
    shown = {line.split()[0]: line.split("B  ")[-1].strip() for line in lines if "part" in line}
    assert shown["conv2d0"] == "part 1"
    assert shown["tanh1"] == "part 1, output kept"
    assert "part 2" in shown["conv2d2"]
    assert "linear5" not in shown
    assert any(line.startswith("recomputed ") and "of forward" in line for line in lines)
    assert not any("recomputed" in line for line in Model(chain(), IMAGE).summary(4).splitlines())


def test_with_several_micro_batches_in_flight_the_last_part_is_recomputed_too() -> None:
    model = Model(create_net("resnet20", 10, (32, 32, 3)), (32, 32, 3), recompute="auto")
    one, four = (Forecast(model, 8, 1, in_flight) for in_flight in (1, 4))
    model.choose_segments(8, slots=1, in_flight=4)
    nodes = len(model.graph.nodes)
    assert model.cuts[-1] == nodes
    assert four.memory(model.cuts).peak < four.memory(model.cuts[:-1]).peak
    kept = sum(one.memory(()).kept)
    assert four.memory(()).peak == pytest.approx(one.memory(()).peak + 3 * kept, rel=0.01)
    x = np.ones((2, 32, 32, 3), "float32")
    y, saved = model.forward(x, StepContext(training=True, samples=np.arange(2)))
    model.backward(np.ones_like(y), saved)
    gradients = [p.grad.copy() for p in model.parameters.values()]
    model.cut(())
    y, saved = model.forward(x, StepContext(training=True, samples=np.arange(2)))
    model.backward(np.ones_like(y), saved)
    for p, gradient in zip(model.parameters.values(), gradients, strict=True):
        np.testing.assert_array_equal(p.grad, gradient)


class Doubled(Layer):
    """Saves nothing, and notes how many outputs of such layers exist."""

    saves = ()
    new_output = True

    def __init__(self, outputs: list[weakref.ref], alive: list[int]) -> None:
        super().__init__()
        self.outputs, self.alive = outputs, alive

    def forward(self, *xs: np.ndarray, context: StepContext) -> tuple[np.ndarray, None]:
        y = 2 * xs[0]
        self.outputs.append(weakref.ref(y))
        self.alive.append(sum(ref() is not None for ref in self.outputs))
        return y, None

    def backward(self, dy: np.ndarray, saved: None) -> np.ndarray:
        return 2 * dy


def test_values_within_a_segment_are_freed_after_their_last_reader_again() -> None:
    outputs: list[weakref.ref] = []
    alive: list[int] = []
    body = [Doubled(outputs, alive) for _ in range(5)]
    model = Model(Sequential(Linear(4), *body, Sigmoid(), Linear(3)), (4,), backend="numpy")
    model.cut((1, 7))
    y, residuals = model.forward(np.ones((2, 4), "float32"), StepContext(training=True))
    model.backward(np.ones_like(y), residuals)
    # the input and the output of a layer, each time
    assert len(alive) == 10
    assert max(alive) <= 2

"""Every kind of layer in a network that is cut, and what else can be done with such a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import (
    GELU,
    AdaptiveAvgPool2d,
    Add,
    AvgPool2d,
    AvgPool3d,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Conv3d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GlobalAvgPool3d,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    LocalResponseNorm,
    LogSoftmax,
    MaxPool2d,
    MaxPool3d,
    Pad,
    ReLU,
    Reshape,
    Residual,
    Sequential,
    Slice,
    Softmax,
    Softplus,
    StepContext,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.models import vit
from pydtnn.parallel.mesh import Mesh
from pydtnn.testing import check_plan
from tests.each import each
from tests.model.partition.networks import resnet8


class Turned(Layer):
    """A layer of a user's, which declares nothing."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0][:, ::-1], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy[:, ::-1]


class OwnConv(Conv2d):
    """A convolution that a user has overridden."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return super().forward(*xs, context=context)


class TwoOutputs(Block):
    """Two inputs and two outputs, one of which is read by other layers, too."""

    def wire(self, graph: Any, *inputs: Any) -> Any:
        x, z = inputs
        a = graph.add(Conv2d(4, 3, padding=1, name="a"), x)
        b = graph.add(Conv2d(4, 3, padding=1, name="b"), z)
        joined = graph.add(ReLU(), graph.add(Add(), a, b))
        return graph.add(Linear(3, name="l"), graph.add(GlobalAvgPool2d(), joined)), a


class ReadTwice(Block):
    """A convolution whose output is read by another one and, then, by a layer of its channels."""

    def wire(self, graph: Any, *inputs: Any) -> Any:
        a = graph.add(Conv2d(6, 3, padding=1, name="a"), *inputs)
        b = graph.add(Conv2d(6, 3, padding=1, name="b"), a)
        joined = graph.add(Add(), graph.add(ReLU(), a), b)
        return graph.add(Linear(3), graph.add(GlobalAvgPool2d(), joined))


def first() -> Conv2d:
    return Conv2d(6, 3, padding=1)


def head() -> Sequential:
    return Sequential(Flatten(), Linear(3))


def shortcut() -> Residual:
    """Every other pixel, with zeros for the channels that are missing."""
    every = slice(None, None, 2)
    pad = Pad(((0, 0), (0, 0), (1, 1)))
    return Residual(Conv2d(8, 3, stride=2, padding=1), Sequential(Slice(every, every), pad))


IMAGE = (9, 7, 3)
SEVERAL = (IMAGE, (9, 7, 2))
NETS: dict[str, tuple[Callable[[], Any], Any]] = {
    "dropout": (lambda: [first(), Dropout(0.4), first(), ReLU(), Dropout(0.3), head()], IMAGE),
    "norms": (lambda: [first(), GroupNorm(2), ReLU(), first(), LayerNorm(axes=3), head()], IMAGE),
    "responses": (
        lambda: [first(), LocalResponseNorm(3, alpha=0.5), ReLU(), MaxPool2d(2), first(), head()],
        IMAGE,
    ),
    "softmax": (lambda: [first(), Softmax(), first(), LayerNorm(), GELU(), head()], IMAGE),
    "log softmax": (lambda: [first(), Softplus(), first(), LogSoftmax(), first(), head()], IMAGE),
    "groups": (
        lambda: [
            first(),
            Conv2d(12, 3, padding=1, groups=6),
            ReLU(),
            Conv2d(9, 3, groups=3),
            BatchNorm(),
            Conv2d(6, 1, stride=2),
            GlobalAvgPool2d(),
            Linear(3),
        ],
        IMAGE,
    ),
    "several": (lambda: TwoOutputs(name=""), SEVERAL),
    "custom": (lambda: [first(), Turned(), OwnConv(4, 3), BatchNorm(), ReLU(), head()], IMAGE),
    "shortcut": (lambda: [first(), shortcut(), ReLU(), GlobalAvgPool2d(), Linear(3)], IMAGE),
    "slices": (
        lambda: [
            first(),
            Slice(slice(1, None, 2), slice(0, -1, 3)),
            Pad(((1, 2), (0, 0), (0, 0))),
            Slice(slice(2, None)),
            head(),
        ],
        (13, 9, 3),
    ),
    "adaptive": (
        lambda: [first(), AdaptiveAvgPool2d((3, 2)), first(), AdaptiveAvgPool2d(1), head()],
        IMAGE,
    ),
    "pools": (
        lambda: [
            first(),
            MaxPool2d(3, 2, padding=1),
            AvgPool2d(3, 1, padding=1),
            AvgPool2d(3, 2, padding=1, count_padding=False),
            Conv2d(4, 1, stride=2),
            head(),
        ],
        (13, 11, 3),
    ),
    "concat": (lambda: [Branches(first(), Conv2d(6, (3, 1)), merge=Concat(0)), head()], (9, 3, 3)),
    "dilation": (
        lambda: [Conv2d(4, 7, padding=3), Conv2d(4, 5, padding=4, dilation=2), ReLU(), head()],
        (9, 9, 2),
    ),
    "padding": (
        lambda: [
            Conv2d(4, 3, padding="same", stride=2),
            Conv2d(4, (2, 3), padding=((1, 0), (0, 2))),
            MaxPool2d(2, 1, padding="same"),
            Conv2d(4, 4, padding="same"),
            head(),
        ],
        (11, 10, 2),
    ),
    "rows": (lambda: [first(), Reshape((-1, 6)), Linear(5), Tanh(), head()], IMAGE),
    "tokens": (
        lambda: [vit(8, 2, 2, 3, (9, 9, 3), patch=3, dropout=0.2, attention_dropout=0.2)],
        (9, 9, 3),
    ),
    "volumes": (
        lambda: [
            Conv3d(6, 3, padding=1),
            BatchNorm(),
            ReLU(),
            MaxPool3d(2),
            Conv3d(6, 2, groups=3, padding=1),
            AvgPool3d(2, 1),
            Conv3d(4, (1, 2, 2)),
            GlobalAvgPool3d(),
            Linear(3),
        ],
        (4, 6, 5, 2),
    ),
    "vectors": (
        lambda: [Linear(7), ReLU(), Residual(Sequential(Linear(7), GELU(), Linear(7))), Linear(3)],
        (6,),
    ),
}
MIXED = [
    *((name, strategy) for name in NETS for strategy in ("alternate", "data")),
    *((name, strategy) for name in NETS for strategy in ("spatial", "filter", "channel", "width")),
]
NOT_CUT = {(name, way) for name in ("vectors", "volumes") for way in ("spatial", "width")}
QUICK = {("dropout", "data"), ("norms", "spatial"), ("groups", "filter"), ("several", "alternate")}
QUICK |= {("tokens", "alternate"), ("tokens", "data")}
QUICK |= {("custom", "spatial"), ("slices", "spatial"), ("pools", "width"), ("rows", "data")}
QUICK |= {("volumes", "alternate"), ("volumes", "filter"), ("volumes", "data")}
QUICK |= {("responses", "alternate"), ("responses", "spatial")}


def axis_of(strategy: str) -> str:
    return "model" if strategy == "data" else strategy


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "strategy"), sorted(QUICK))
def test_a_layer_is_cut(name: str, strategy: str) -> None:
    check_plan(*NETS[name], strategy, meshes=[{axis_of(strategy): 2}], batch=3)


@pytest.mark.long
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "strategy"), [c for c in MIXED if c not in NOT_CUT | QUICK])
def test_every_layer_is_cut(name: str, strategy: str, ranks: int) -> None:
    check_plan(*NETS[name], strategy, meshes=[{axis_of(strategy): ranks}], batch=3)


def test_a_transformer_runs_in_stages() -> None:
    check_plan(*NETS["tokens"], "pipeline", meshes=[{"pipeline": 2}], batch=3)


def test_a_sum_over_ranks_may_be_read_whole_and_in_parts() -> None:
    plan = {"a": {"channel": "model"}, "b": {"filter": "model"}}
    check_plan(ReadTwice(name=""), IMAGE, plan, meshes=[{"model": 2}], batch=3)


def test_the_mean_of_a_map_that_is_cut_along_both_axes_is_that_of_all_parts() -> None:
    net = [first(), ReLU(), GlobalAvgPool2d(), Linear(3)]
    check_plan(net, IMAGE, meshes=[{"spatial": 2, "width": 2}], batch=3)


@each("batch", [1, 2])
def test_a_batch_may_be_smaller_than_the_ranks(batch: int) -> None:
    net = [first(), BatchNorm(), ReLU(), GlobalAvgPool2d(), Linear(3)]
    meshes = [{"model": 3}, {"data": 2, "model": 2}]
    check_plan(net, (5, 5, 2), "data", meshes=meshes, batch=batch)


@each("frozen", ["stem", "*bn*"])
def test_a_part_of_the_network_may_be_frozen(frozen: str) -> None:
    def freeze(model: Model) -> None:
        model.freeze(frozen)

    meshes = [{"spatial": 2}]
    check_plan(resnet8, (9, 11, 3), "spatial", meshes=meshes, batch=3, prepare=freeze)


@each(("backend", "dtype"), [("cpu", "float32"), ("numpy", "bfloat16"), ("numpy", "float16")])
@each("strategy", ["alternate", "spatial"])
def test_other_types_are_as_near_to_float64_as_serially(
    backend: str, dtype: str, strategy: str
) -> None:
    x = np.random.default_rng(0).normal(size=(3, 9, 7, 3)).astype("float32")
    context = StepContext(training=True, samples=np.arange(3))

    def outputs(mesh: Mesh | None, dtype: str) -> tuple[Any, Any]:
        net = Sequential(first(), BatchNorm(), ReLU(), first(), ReLU(), head())
        model = Model(net, IMAGE, backend=backend, dtype=dtype, input_gradient=True, mesh=mesh)
        y, saved = model.forward(x.astype(y_type(dtype)), context)
        return y, model.backward(np.ones_like(y), saved)

    def rank(comm: Communicator) -> tuple[Any, Any]:
        return outputs(Mesh(comm, **{strategy: 2}), dtype)

    exact, serial = outputs(None, "float64"), outputs(None, dtype)
    for arrays in run_threads(2, rank):
        for ours, one, true in zip(arrays, serial, exact, strict=True):
            assert np.linalg.norm(ours - true) <= 3 * np.linalg.norm(one - true)


def y_type(dtype: str) -> str:
    """Type of inputs and outputs of a model."""
    return "float64" if dtype == "float64" else "float32"

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
    Net,
    Pad,
    ReLU,
    Reshape,
    Residual,
    Sequential,
    Slice,
    Softmax,
    StepContext,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.models import vit
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing import check_plan
from tests.each import each
from tests.model.networks import projection


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


def norms() -> list[Net]:
    response = LocalResponseNorm(3, alpha=0.5)
    return [first(), GroupNorm(2), ReLU(), first(), response, LayerNorm(axes=3)]


def groups() -> list[Net]:
    convs = [Conv2d(12, 3, padding=1, groups=6), ReLU(), Conv2d(9, 3, groups=3), BatchNorm()]
    return [first(), *convs, Conv2d(6, 1, stride=2), GlobalAvgPool2d(), Linear(3)]


def slices() -> list[Net]:
    steps = [Slice(slice(1, None, 2), slice(0, -1, 3)), Pad(((1, 2), (0, 0), (0, 0)))]
    return [first(), *steps, Slice(slice(2, None)), head()]


def pools() -> list[Net]:
    overlapping = [MaxPool2d(3, 2, padding=1), AvgPool2d(3, 1, padding=1)]
    uneven = AvgPool2d(3, 2, padding=1, count_padding=False)
    return [first(), *overlapping, uneven, first(), AdaptiveAvgPool2d((3, 2)), head()]


def windows() -> list[Net]:
    dilated = [Conv2d(4, 7, padding=3), Conv2d(4, 5, padding=4, dilation=2), ReLU()]
    uneven = [Conv2d(4, 3, padding="same", stride=2), Conv2d(4, (2, 3), padding=((1, 0), (0, 2)))]
    return [*dilated, *uneven, MaxPool2d(2, 1, padding="same"), head()]


def volumes() -> list[Net]:
    body = [Conv3d(6, 3, padding=1), BatchNorm(), ReLU(), MaxPool3d(2)]
    grouped = [Conv3d(6, 2, groups=3, padding=1), AvgPool3d(2, 1), Conv3d(4, (1, 2, 2))]
    return [*body, *grouped, GlobalAvgPool3d(), Linear(3)]


def vectors() -> list[Net]:
    return [Linear(7), ReLU(), Residual(Sequential(Linear(7), GELU(), Linear(7))), Linear(3)]


def tokens() -> Net:
    return vit(8, 2, 2, 3, (9, 9, 3), patch=3, dropout=0.2, attention_dropout=0.2)


NETS: dict[str, tuple[Callable[[], Any], Any]] = {
    "norms": (lambda: [*norms(), head()], IMAGE),
    "softmax": (lambda: [first(), Softmax(), Dropout(0.4), first(), LogSoftmax(), head()], IMAGE),
    "groups": (groups, IMAGE),
    "several": (lambda: TwoOutputs(name=""), (IMAGE, (9, 7, 2))),
    "custom": (lambda: [first(), Turned(), OwnConv(4, 3), BatchNorm(), ReLU(), head()], IMAGE),
    "shortcut": (lambda: [first(), shortcut(), ReLU(), GlobalAvgPool2d(), Linear(3)], IMAGE),
    "slices": (slices, (13, 9, 3)),
    "pools": (pools, (17, 13, 3)),
    "concat": (lambda: [Branches(first(), Conv2d(6, (3, 1)), merge=Concat(0)), head()], (9, 3, 3)),
    "windows": (windows, (13, 12, 2)),
    "rows": (lambda: [first(), Reshape((-1, 6)), Linear(5), Tanh(), head()], IMAGE),
    "tokens": (tokens, (9, 9, 3)),
    "volumes": (volumes, (4, 6, 5, 2)),
    "vectors": (vectors, (6,)),
}
CUT = {
    "alternate": "norms several shortcut tokens volumes vectors",
    "channel": "norms groups slices volumes",
    "data": "softmax rows tokens volumes vectors",
    "filter": "softmax groups custom concat tokens volumes",
    "spatial": "softmax norms several custom slices pools concat windows rows",
    "width": "softmax shortcut pools windows",
}
"""The networks of each strategy."""


@pytest.mark.few(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, way) for way in CUT for name in CUT[way].split()]
)
def test_every_layer_is_cut(name, strategy, ranks):
    axis = "model" if strategy == "data" else strategy
    check_plan(*NETS[name], strategy, meshes=[{axis: ranks}], batch=3)


def test_a_sum_over_ranks_may_be_read_whole_and_in_parts():
    plan = {"a": {"channel": "model"}, "b": {"filter": "model"}}
    check_plan(ReadTwice(name=""), IMAGE, plan, meshes=[{"model": 2}], batch=3)


def test_the_mean_of_a_map_that_is_cut_along_both_axes_is_that_of_all_parts():
    net = [first(), ReLU(), GlobalAvgPool2d(), Linear(3)]
    check_plan(net, IMAGE, meshes=[{"spatial": 2, "width": 2}], batch=3)


@each("batch", [2, 1], few=1)
def test_a_batch_may_be_smaller_than_the_ranks(batch):
    net = [first(), BatchNorm(), ReLU(), GlobalAvgPool2d(), Linear(3)]
    meshes = [{"model": 3}, {"data": 2, "model": 2}]
    check_plan(net, (5, 5, 2), "data", meshes=meshes, batch=batch)


def test_a_part_of_the_network_may_be_frozen():
    def freeze(model: Model) -> None:
        model.freeze("conv2d0", "*batchnorm1")

    meshes = [{"spatial": 2}]
    check_plan(projection, (9, 11, 3), "spatial", meshes=meshes, batch=3, prepare=freeze)


@each(("backend", "dtype"), [("cpu", "float32"), ("numpy", "bfloat16")])
@each("strategy", ["alternate", "spatial"])
def test_other_types_are_as_near_to_float64_as_serially(backend, dtype, strategy):
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

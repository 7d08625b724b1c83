"""The fusion pass changes how a network is computed, not what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend, Deferred, create_backend
from pydtnn.layers import (
    Add,
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Identity,
    Layer,
    LeakyReLU,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Residual,
    Sequential,
    SiLU,
    StepContext,
)
from pydtnn.layers.blocks import Block, Net, nodes
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.model import Model
from pydtnn.model.fusion import fuse
from pydtnn.model.graph import Graph, Node
from pydtnn.model.memory import forecast_memory
from pydtnn.models import cifar_resnet
from tests.each import each

NUMPY = create_backend("numpy")
IMAGE = (7, 6, 3)
SAME = 1e-11
"""Between two orders of the same float64 operations, for deep nets with few rows per channel."""

conv = partial(Conv2d, kernel_size=3, padding=1)


def unit(filters: int, stride: int = 1, bias: bool = False) -> list[Layer]:
    return [conv(filters, stride=stride, bias=bias), BatchNorm(), ReLU()]


def residual() -> Net:
    body = [*unit(4), conv(4, bias=False), BatchNorm()]
    return Sequential(*unit(4), Residual(Sequential(*body)), ReLU(), conv(5))


def projection() -> Net:
    body = Sequential(*unit(6, stride=2), conv(6), BatchNorm())
    shortcut = Sequential(Conv2d(6, 1, stride=2), BatchNorm())
    return Sequential(*unit(4), Residual(body, shortcut=shortcut), ReLU(), conv(2))


def preactivation() -> Net:
    def body() -> list[Layer]:
        return [BatchNorm(), ReLU(), conv(4), BatchNorm(), ReLU(), conv(4)]

    return Sequential(
        conv(4),
        Residual(Sequential(*body())),
        Residual(Sequential(*body())),
        BatchNorm(),
        ReLU(),
        Flatten(),
    )


def dense() -> Net:
    def layer() -> Branches:
        return Branches(Identity(), Sequential(BatchNorm(), ReLU(), conv(2)), merge=Concat())

    return Sequential(conv(3), layer(), layer(), BatchNorm(), ReLU(), GlobalAvgPool2d())


class LateSource(Block):
    """The other input of the addition is made, and read, after the normalised convolution."""

    def wire(self, graph: Graph, *inputs: Node) -> Node:
        normed = graph.add(BatchNorm(name="n"), graph.add(conv(4, name="a"), *inputs))
        plain = graph.add(conv(4, name="b"), *inputs)
        other = graph.add(conv(4, name="c"), plain)
        total = graph.add(ReLU(name="r"), graph.add(Add(name="s"), normed, plain))
        return graph.add(Add(name="t"), graph.add(conv(4, name="d"), total), other)


class SeveralReaders(Block):
    """A ReLU read by two convolutions, a pooling and the outside."""

    def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
        y = graph.add(Sequential(*unit(4), name="u"), *inputs)
        first = graph.add(conv(4, name="a"), y)
        second = graph.add(Sequential(conv(4), BatchNorm(), name="b"), y)
        pooled = graph.add(MaxPool2d(3, stride=1, padding=1, name="p"), y)
        merged = graph.add(Add(name="s"), first, second)
        return graph.add(Add(name="t"), merged, pooled), y


class OutputBeforeNorm(Block):
    """A convolution that is an output and is read by a batch norm."""

    def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
        y = graph.add(conv(4, name="a"), *inputs)
        return graph.add(Sequential(BatchNorm(), ReLU(), name="n"), y), y


NETS: dict[str, Callable[[], Net]] = {
    "residual": residual,
    "projection": projection,
    "preactivation": preactivation,
    "dense": dense,
    "late source": LateSource,
    "several readers": SeveralReaders,
    "an output before a norm": OutputBeforeNorm,
    "norm alone": lambda: Sequential(Flatten(), BatchNorm()),
    "norm of a linear layer": lambda: Sequential(Flatten(), Linear(5), BatchNorm(), ReLU()),
    "biased convolution and norm": lambda: Sequential(*unit(4, bias=True), *unit(3, bias=True)),
    "norm without ReLU": lambda: Sequential(conv(4), BatchNorm(), conv(3)),
    "norm and another activation": lambda: Sequential(conv(4), BatchNorm(), SiLU(), conv(3)),
    "norm and ReLU6": lambda: Sequential(
        *(conv(4), BatchNorm(), ReLU6(), conv(3), ReLU6(), conv(2), ReLU6(), MaxPool2d(2)),
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
    "a sum with itself": lambda: Sequential(conv(4), Branches(Identity(), Identity(), merge=Add())),
    "strides and groups": lambda: Sequential(
        *unit(4, stride=2), Conv2d(4, 3, groups=4, padding=2, dilation=2), BatchNorm(), ReLU()
    ),
    "resnet8": lambda: cifar_resnet(8, 3, (8, 8, 3)),
}

SOME = ("residual", "projection", "several readers", "ReLU between convolutions")


def shape_of(name: str) -> tuple[int, ...]:
    return (8, 8, 3) if name == "resnet8" else IMAGE


def both(name: str, backend: Backend = NUMPY, dtype: str = "float64") -> tuple[Model, Model]:
    """The network as it is written, and fused; with equal parameters, all of them random."""
    shape = shape_of(name)
    models = [
        Model(NETS[name](), shape, backend=backend, dtype=dtype, input_gradient=True, fuse=f)
        for f in (False, True)
    ]
    for model in models:
        rng = np.random.default_rng(1)
        for key in sorted(model.parameters):
            p = model.parameters[key]
            p.master += backend.asarray(0.1 * rng.normal(size=p.shape), dtype)
        for s in model.statistics.statistics:
            s.mean += 0.1
            s.variance *= 1.3
    return models[0], models[1]


def run(model: Model, training: bool, batch: int = 3, micro: int = 1) -> dict[str, np.ndarray]:
    """One step's outputs, gradients and statistics by name."""
    rng, backend = np.random.default_rng(2), model.backend
    result: dict[str, Any] = {}
    for i in range(micro):
        x = backend.asarray(rng.normal(size=(batch, *model.input_shapes[0])), model.dtype)
        given = x.copy()
        ys, residuals = model.forward(x, StepContext(training=training, samples=np.arange(batch)))
        outputs = ys if isinstance(ys, tuple) else (ys,)
        dys = tuple(rng.normal(size=y.shape) for y in outputs)
        result |= {f"y{j}": y.copy() for j, y in enumerate(outputs)}
        result["dx"] = model.backward(dys, residuals, accumulate=i > 0)
        assert (x == given).all()
    result |= {f"grad {key}": p.grad for key, p in model.parameters.items()}
    result["sums"] = model.statistics.sums
    return {key: backend.to_numpy(array).copy() for key, array in result.items()}


def assert_close(given: dict[str, np.ndarray], expected: dict[str, np.ndarray], tol: float) -> None:
    assert given.keys() == expected.keys()
    scale = max(np.abs(array).max() for key, array in expected.items() if key.startswith("grad"))
    for key, array in expected.items():
        own = np.abs(array).max(initial=0)
        allowed = tol * max(own, scale if key.startswith("grad") else own)
        assert np.abs(given[key] - array).max(initial=0) <= allowed, key


@pytest.mark.few(32)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NETS)
def test_outputs_and_gradients_are_those_of_the_plain_network(
    backend: Backend, name: str, training: bool
) -> None:
    plain, fused = both(name, backend)
    assert_close(run(fused, training), run(plain, training), SAME)


@each("name", SOME)
def test_float32_agrees_within_its_rounding(backend: Backend, name: str) -> None:
    plain, fused = both(name, backend, "float32")
    assert_close(run(fused, True), run(plain, True), 1e-4)  # 3 images; sums of a few hundred


@each("name", NETS)
def test_inference_agrees(backend: Backend, name: str) -> None:
    plain, fused = both(name, backend)
    x = np.random.default_rng(3).normal(size=(5, *shape_of(name)))
    given, expected = fused.predict(x), plain.predict(x)
    for y, wanted in zip(np.atleast_1d(given), np.atleast_1d(expected), strict=True):
        assert np.allclose(y, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@each("name", SOME)
def test_gradients_of_micro_batches_add_up(backend: Backend, name: str) -> None:
    plain, fused = both(name, backend)
    assert_close(run(fused, True, micro=3), run(plain, True, micro=3), SAME)


@each("name", SOME)
def test_a_batch_may_be_empty(backend: Backend, name: str) -> None:
    plain, fused = both(name, backend)
    given, expected = run(fused, True, batch=0), run(plain, True, batch=0)
    assert all(np.array_equal(given[key], array) for key, array in expected.items())


@each("name", NETS)
def test_names_and_state_do_not_depend_on_fusion(name: str) -> None:
    plain, fused = both(name)
    assert plain.state().keys() == fused.state().keys()
    state = {key: array + 1 for key, array in plain.state().items()}
    fused.load(state)
    assert all(np.array_equal(array, state[key]) for key, array in fused.state().items())


def kinds(net: Net, shape: tuple[int, ...] = IMAGE) -> list[str]:
    return [type(layer).__name__ for layer in Model(net, shape, backend="numpy", fuse=True).layers]


def test_a_residual_block_is_two_convolutions_and_two_maps() -> None:
    assert kinds(residual()) == [*["FusedConv2d", "NormAddReLU"] * 3, "FusedConv2d"]


def test_a_relu_is_cut_off_by_the_convolution_and_one_before_another_deferred() -> None:
    net = Sequential(conv(4), ReLU(), conv(3), ReLU(), Flatten())
    assert kinds(net) == ["FusedConv2d", "NormAddReLU", "FusedConv2d", "Flatten"]


@each("relu", [ReLU, ReLU6, LeakyReLU])
def test_a_relu_between_a_convolution_and_a_max_pool_runs_after_it(relu: type[Layer]) -> None:
    def net(padding: int = 1) -> Net:
        return Sequential(conv(4), relu(), MaxPool2d(3, stride=2, padding=padding), Flatten())

    assert kinds(net()) == ["FusedConv2d", "MaxPool2d", relu.__name__, "Flatten"]
    plain, fused = (Model(net(), IMAGE, backend="cpu", fuse=f) for f in (False, True))
    for key, expected in run(plain, training=True).items():
        assert run(fused, training=True)[key].tobytes() == expected.tobytes(), key
    kept = forecast_memory(fused, 16).kept
    assert kept[2] < 16 * 4 * 7 * 6 * 4  # of the pool, in place of the convolution's output
    assert sum(kept) < sum(forecast_memory(plain, 16).kept)


def test_a_relu_that_others_read_stays_before_the_max_pool() -> None:
    shared = Sequential(
        conv(3), ReLU(), Branches(MaxPool2d(1), Identity(), merge=Concat()), Flatten()
    )
    assert "ReLU" not in kinds(shared)  # it is the convolution's


def test_a_limited_relu_is_deferred_where_convolutions_apply_masks() -> None:
    unit, units = ["FusedConv2d", "NormAddReLU"], NETS["norm and ReLU6"]
    assert kinds(units()) == [*unit * 2, "FusedConv2d", "MaxPool2d", "ReLU6"]
    without = replace(create_backend("numpy"), gates=False)
    model = Model(units(), IMAGE, backend=without, fuse=True)
    assert [type(layer).__name__ for layer in model.layers].count("ReLU6") == 3


def test_what_has_nothing_to_fuse_with_stays() -> None:
    assert kinds(Sequential(Flatten(), BatchNorm())) == ["Flatten", "BatchNorm"]
    assert kinds(Sequential(ReLU(), MaxPool2d(2))) == ["ReLU", "MaxPool2d"]


def test_a_convolution_of_a_users_own_gets_arrays() -> None:
    class Own(Conv2d):
        def forward(self, *xs, context):
            assert not any(isinstance(x, Deferred) for x in xs)
            return super().forward(*xs, context=context)

    net = Sequential(*unit(4), Own(4, 3), BatchNorm(), ReLU(), conv(2))
    model = Model(net, IMAGE, backend="numpy", fuse=True)
    y, residuals = model.forward(np.ones((2, *IMAGE), "float32"), StepContext(training=True))
    model.backward(np.ones_like(y), residuals)
    assert y.shape == (2, 5, 4, 2)


def test_inference_multiplies_the_norm_into_the_filters() -> None:
    model = both("residual")[1]
    found: list[Deferred] = []
    for layer in model.layers:
        if isinstance(layer, NormAddReLU):
            inner = layer.forward

            def forward(*xs, context, inner=inner):
                y, saved = inner(*xs, context=context)
                found.append(y)
                return y, saved

            layer.forward = forward  # type: ignore[method-assign]
    model.predict(np.ones((2, *IMAGE)))
    assert len(found) == 3
    assert all(term.factor is None for y in found for term in y.terms)


def test_a_deferred_output_with_one_reader_is_stored_only_where_memory_is_cheap(
    backend: Backend,
) -> None:
    model = both("biased convolution and norm", backend)[1]
    context = StepContext(training=True)
    _, residuals = model.forward(np.ones((2, *IMAGE)), context)
    (value,) = residuals[3]  # of the second convolution
    assert isinstance(value, Deferred)
    assert (value.array is not None) == backend.keeps_values


def test_fusing_keeps_the_outputs() -> None:
    graph = Graph([IMAGE], backend=Model(conv(1), IMAGE, backend="numpy").backend, dtype="float64")
    outputs = nodes(graph.add(Sequential(conv(2), ReLU()), *graph.inputs))
    (output,) = fuse(graph, outputs)
    assert output.name == "0" or type(output.layer) is FusedConv2d
    graph.finish((output,))

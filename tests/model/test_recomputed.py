"""Outputs that are computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import (
    GELU,
    Add,
    ArcTan,
    AvgPool2d,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Embedding,
    Flatten,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Net,
    ReLU,
    ReLU6,
    Reshape,
    Residual,
    Sequential,
    Sigmoid,
    SiLU,
    StepContext,
)
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.model.memory import forecast_memory
from tests.each import each
from tests.model.networks import assert_same, passes, unit

SHAPE = (40, 24)
BATCH = 32


def block() -> Net:
    attention = Sequential(LayerNorm(), MultiHeadAttention(3))
    mlp = Sequential(LayerNorm(), Linear(96), GELU(), Linear(24))
    return Sequential(Residual(attention), Residual(mlp))


def inception() -> Net:
    def block() -> Net:
        pooled = Sequential(AvgPool2d(3, 1, padding=1), *unit(2))
        return Branches(
            Sequential(*unit(5)), Sequential(*unit(4), *unit(3)), pooled, merge=Concat()
        )

    return Sequential(Reshape((8, 5, 24)), *unit(6), block(), block(), Flatten(), Linear(3))


class Dense(Block):
    """A unit of a DenseNet: its output beside its input."""

    def wire(self, graph: Graph, *inputs: Node) -> Node:
        norms = [BatchNorm(), ReLU()]
        convs = [Conv2d(3, 1, bias=False), BatchNorm(), ReLU(), Conv2d(2, 3, padding=1)]
        return graph.add(Concat(), *inputs, graph.add(Sequential(*norms, *convs), *inputs))


def dense() -> Net:
    transition = [BatchNorm(), ReLU(), Conv2d(4, 1), AvgPool2d(2)]
    end = [BatchNorm(), ReLU(), Flatten(), Linear(3)]
    blocks = [Dense(), Dense(), Dense(), *transition, Dense(), Dense()]
    return Sequential(Reshape((8, 5, 24)), Conv2d(6, 3, padding=1), *blocks, *end)


def tied() -> Net:
    """The logits compute the last norm again."""
    embedding = Embedding(11, 8, tied=True)
    return Sequential(embedding, LayerNorm(), embedding)


NETS = {
    "tied": tied,
    "inception": inception,
    "dense": dense,
    "transformer": lambda: Sequential(Linear(24), block(), block(), LayerNorm(), Linear(3)),
    "several readers": lambda: Sequential(
        Linear(8), SiLU(), Branches(Linear(5), Linear(5), merge=Add()), GroupNorm(1), Linear(2)
    ),
    "another reader": lambda: Sequential(
        Linear(24), LayerNorm(), Residual(Sequential(Linear(9), GELU(), Linear(24))), Linear(2)
    ),
    "first layer": lambda: Sequential(LayerNorm(), Linear(5), GELU(), Linear(2), LayerNorm()),
    "activations": lambda: Sequential(
        Flatten(), Linear(6), ReLU(), Linear(6), ArcTan(), Linear(5), Sigmoid(), Linear(2)
    ),
}


def keeping(model: Model) -> Model:
    """The same model, with all outputs kept."""
    for node in model.graph.nodes:
        if getattr(node.layer, "recomputed", False):
            node.layer.recomputed = False
        if isinstance(node.layer, NormAddReLU):
            node.layer.drops = node.layer.stays = False
        if isinstance(node.layer, Concat):
            node.pitched = node.layer.pitched = ()
    return model


@each("backend", ["numpy", "cpu"], few=19)
@each("dtype", ["float32", "float64", "bfloat16"])
@each("name", NETS)
def test_gradients_are_the_same_bytes_as_with_outputs_that_are_kept(name, dtype, backend):
    if name == "tied" and dtype == "bfloat16":
        pytest.skip("tokens are float32 or float64")
    shape, options = SHAPE[: 1 if name == "tied" else 2], {"backend": backend, "dtype": dtype}
    models = [Model(NETS[name](), shape, seed=3, **options) for _ in range(2)]
    assert any(getattr(layer, "recomputed", False) for layer in models[0].layers)
    assert_same(passes(models[0], batch=BATCH), passes(keeping(models[1]), batch=BATCH))


def test_a_block_of_a_transformer_keeps_ten_arrays_instead_of_sixteen():
    def kept(model: Model) -> float:
        """Arrays of one block between forward and backward, in units of its input."""
        nbytes = zip(model.graph.nodes, forecast_memory(model, BATCH).kept, strict=True)
        return sum(n for node, n in nbytes if node.name.startswith("b1")) / (4 * BATCH * 40 * 24)

    def model() -> Model:
        blocks = (Sequential(block(), name=f"b{i}") for i in range(3))
        return Model(Sequential(Linear(24), *blocks), SHAPE, backend="cpu")

    small = 0.5  # moments of norms and attention
    assert 10 <= kept(model()) < 10 + small
    assert 16 <= kept(keeping(model())) < 16 + small


def saved_bytes(net: Callable[[], Net]) -> int:
    """What recomputed outputs would take."""
    model, before = (Model(net(), SHAPE, backend="cpu") for _ in range(2))
    keeping(before)
    return sum(forecast_memory(before, BATCH).kept) - sum(forecast_memory(model, BATCH).kept)


def test_convolutions_do_not_keep_a_concatenation_of_normalised_inputs():
    pixels, channels = 4 * BATCH * 8 * 5, 5 + 3 + 2
    assert saved_bytes(inception) == pixels * channels  # the second is an output's


def test_norms_do_not_keep_concatenations_but_the_units_of_which_they_consist():
    first, second = (8 + 10 + 12) - 3 * 2, (6 + 8) - 2 * 2  # channels
    assert saved_bytes(dense) == 4 * BATCH * (8 * 5 * first + 4 * 2 * second)


def residual(activation: Callable[[], Layer], blocks: int = 5) -> Net:
    def body() -> Net:
        return Sequential(*unit(4), Conv2d(6, 3, padding=1), BatchNorm())

    first = [Reshape((8, 5, 24)), Conv2d(6, 3, padding=1), BatchNorm(), activation()]
    parts = [part for _ in range(blocks) for part in (Residual(body()), activation())]
    return Sequential(*first, *parts, Conv2d(3, 1), Flatten(), Linear(3))


@each("backend", ["numpy", "cpu"])
@each("dtype", ["float32", "float64"])
@each("activation", [ReLU, ReLU6])
def test_every_second_sum_of_a_resnet_is_not_kept(activation, dtype, backend):
    model, before = (
        Model(residual(activation), SHAPE, backend=backend, dtype=dtype, seed=3) for _ in range(2)
    )
    norms = [layer for layer in model.layers if isinstance(layer, NormAddReLU)]
    assert [norm.drops for norm in norms if norm.keeps] == [True, False, True, False, False]
    kept, whole = (sum(forecast_memory(m, BATCH).kept) for m in (model, keeping(before)))
    assert whole - kept == 2 * BATCH * 8 * 5 * 6 * model.dtype.itemsize
    assert_same(passes(model, batch=BATCH), passes(before, batch=BATCH))


def test_a_concatenation_passes_on_views_only_where_they_are_added():
    model = Model(dense(), SHAPE, backend="cpu")
    joins = [node for node in model.graph.nodes if isinstance(node.layer, Concat)]
    assert [node.pitched for node in joins] == [(), (0,), (0,), (), (0,)]


class Twice(Linear):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        assert isinstance(xs[0], np.ndarray)
        return super().forward(2 * xs[0], context=context)


class Halved(GELU):
    def forward(self, *xs: Any, context: StepContext) -> Any:
        y, saved = super().forward(*xs, context=context)
        return y / 2, saved


@each("middle", [(GELU, Twice), (Halved, Linear), (GELU, partial(Conv2d, kernel_size=1))])
def test_layers_that_override_the_computation_exchange_arrays(middle):
    first, second = middle
    model = Model(Sequential(Linear(6), first(), second(2)), (6, 6, 2), backend="numpy")
    assert not model.layers[1].recomputed
    passes(model)


@each("at", range(2, 8))
def test_segments_that_are_recomputed_keep_values_only(at):
    def net() -> Net:
        mlp = (Linear(6), LayerNorm(), Linear(7), GELU(), Linear(5), LayerNorm(), Linear(2))
        return Sequential(*mlp)

    plain, cut = (Model(net(), SHAPE, backend="cpu", seed=3) for _ in range(2))
    cut.cut((1, at))
    assert_same(passes(cut), passes(plain))
    assert sum(forecast_memory(cut, BATCH).kept) <= sum(forecast_memory(plain, BATCH).kept)

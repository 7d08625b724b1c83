"""Recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.kernels import Backend
from pydtnn.layers import (
    GRU,
    LSTM,
    GRULayer,
    Linear,
    LSTMLayer,
    Net,
    Sequential,
    StepContext,
)
from pydtnn.layers.blocks import Block, Graph
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.testing import check_layer, check_plan
from pydtnn.training import Trainer
from tests.each import each

KINDS = [LSTMLayer, GRULayer]
STACKS = [LSTM, GRU]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reverse": True},
    {"return_sequences": False},
    {"return_sequences": False, "reverse": True, "bias": False},
]


@each("options", OPTIONS)
@each("kind", KINDS)
def test_a_direction_keeps_the_contract(
    kind: Any, options: dict[str, Any], backend: Backend
) -> None:
    check_layer(kind(5, **options), (4, 3), backend=backend)


class WithLengths(Block):
    """Sequences and their lengths."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def wire(self, graph: Graph, *inputs: Node) -> Any:
        return graph.add(self.net, *inputs)


def passes(model: Model, *xs: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Outputs, and the gradients of x and of the parameters for a gradient of ones."""
    y, saved = model.forward(xs if len(xs) > 1 else xs[0], StepContext(training=False))
    dx = model.backward(np.ones_like(y), saved)
    grads = {name: p.grad.copy() for name, p in model.parameters.items()}
    return y, dx[0] if len(xs) > 1 else dx, grads


@each("return_sequences", [True, False])
@each("kind", STACKS)
def test_a_sample_with_a_length_has_the_outputs_and_gradients_of_its_part_alone(
    kind: Any, return_sequences: bool
) -> None:
    def make() -> Any:
        options = {"bidirectional": True, "return_sequences": return_sequences, "name": "a"}
        return kind(4, layers=2, **options)

    x = np.random.default_rng(0).normal(size=(4, 7, 3))
    lengths = np.array([[7.0], [3], [1], [5]])
    options: dict[str, Any] = {"dtype": "float64", "input_gradient": True}
    y, dx, grads = passes(Model(WithLengths(make()), [(7, 3), (1,)], **options), x, lengths)
    sums = dict.fromkeys(grads, 0.0)
    for n, length in enumerate(lengths[:, 0].astype(int)):
        alone = Model(make(), (length, 3), **options)
        (expected,), (expected_dx,), own = passes(alone, x[n : n + 1, :length])
        sums = {name: sums[name] + own[name] for name in own}
        assert not dx[n, length:].any()
        np.testing.assert_allclose(dx[n, :length], expected_dx, atol=1e-14)
        if return_sequences:
            assert not y[n, length:].any()
            np.testing.assert_allclose(y[n, :length], expected, atol=1e-14)
        else:
            np.testing.assert_allclose(y[n], expected, atol=1e-14)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, sums[name], atol=1e-13)


@each("kind", STACKS)
def test_layers_and_directions_are_those_that_their_layers_compute(kind: Any) -> None:
    net = kind(4, layers=2, bidirectional=True, return_sequences=False, dropout=0.5, name="a")
    model = Model(Sequential(net), (5, 3), dtype="float64")
    names = [layer.name for layer in model.layers]
    assert names == [
        *("a.layer0", "a.layer0_reverse", "a.concat0", "a.dropout0"),
        *("a.layer1", "a.layer1_reverse", "a.concat1"),
    ]
    assert model.output_shape == (8,)
    limit = 4**-0.5
    values = np.concatenate([p.master.ravel() for p in model.parameters.values()])
    assert 0.95 * limit < abs(values).max() <= limit  # uniform, as in PyTorch


def test_two_uses_share_their_parameters() -> None:
    lstm = LSTM(3, name="a")
    model = Model(Sequential(lstm, lstm), (5, 3), backend="numpy")
    assert [*model.parameters] == ["a.layer0.w", "a.layer0.u", "a.layer0.b", "a.layer0.b_u"]


def test_inputs_and_options_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"LSTM: expected one input of shape \(T, features\)"):
        Model(LSTM(4), (8, 8, 3), backend="numpy")
    with pytest.raises(ValueError, match=r"GRULayer: expected an input of shape \(T, features\)"):
        Model(GRULayer(4), (8,), backend="numpy")
    with pytest.raises(ValueError, match=r"a second input must be lengths of shape \(1,\), got"):
        Model(WithLengths(GRU(4)), [(8, 2), (2,)], backend="numpy")
    with pytest.raises(ValueError, match="LSTM: dropout must be at least 0 and below 1, got 1"):
        LSTM(4, dropout=1.0)
    with pytest.raises(ValueError, match="LSTMLayer: expected a model of float32 or float64, whi"):
        Model(WithLengths(LSTM(4)), [(8, 2), (1,)], dtype="bfloat16")
    with pytest.raises(TypeError, match=r"use LSTM\(features\)"):
        LSTM(8, 16)  # type: ignore[misc]
    with pytest.raises(TypeError, match="use layers="):
        GRU(16, num_layers=2)  # type: ignore[call-arg]
    model = Model(WithLengths(LSTM(4)), [(8, 2), (1,)], backend="numpy")
    with pytest.raises(ValueError, match=r"lengths must be whole numbers in 0\.\.8, got 9 of sam"):
        passes(model, np.zeros((1, 8, 2), "float32"), np.array([[9.0]], "float32"))


def small() -> list[Net]:
    return [LSTM(5, bidirectional=True), GRU(4, return_sequences=False), Linear(3)]


@each("plan", [None, "filter"])
def test_ranks_train_as_one_does(plan: str | None) -> None:
    meshes = [{"data": 3}] if plan is None else [{"filter": 2}]
    check_plan(small, (4, 3), plan=plan, meshes=meshes)


def test_a_plan_that_cuts_units_is_refused() -> None:
    with pytest.raises(ValueError, match="LSTMLayer cannot be partitioned by filter"):
        check_plan(small, (4, 3), plan={"*.layer0": {"filter": "filter"}}, meshes=[{"filter": 2}])


def test_exact_training_has_the_same_bytes_for_any_number_of_ranks() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5, 3)).astype("float32"), rng.integers(3, size=24)

    def train(comm: Communicator) -> bytes:
        model = Model(Sequential(*small()), (5, 3), backend="cpu")
        exchange = AllReduce(comm, sums=partial(ExactSums, shards=4))
        trainer = Trainer(model, SGD(0.1), exchange=exchange)
        trainer.fit(ArrayDataset(x, y, classes=3), epochs=2, global_batch_size=12)
        return b"".join(p.master.tobytes() for p in model.parameters.values())

    (alone,) = run_threads(1, train)
    for size in (2, 3):
        assert {*run_threads(size, train)} == {alone}


@each("kind", KINDS)
def test_the_operations_are_those_of_its_loops(kind: Any) -> None:
    gates = {LSTMLayer: 4, GRULayer: 3}[kind]
    model = Model(Sequential(Linear(6), kind(5)), (7, 6), backend="numpy")
    cost = model.layers[1].cost(2)
    steps, products = 2 * 7, 2 * gates * 5 * (6 + 5)
    # sigmoid and tanh of sums of two terms; f c' + i g, o tanh(c); or r q, (1 - z) n + z h'
    functions = 2 * gates + (3 + 2 if kind is LSTMLayer else 1 + 4)
    assert cost.flops_forward == steps * (products + 5 * functions)
    assert cost.flops_backward > 2 * steps * products


@each("kind", STACKS)
def test_recomputation_changes_no_byte(kind: Any) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(3, 6, 4)).astype("f"), rng.normal(size=(3, 6, 10)).astype("f")
    grads = []
    for recompute in (None, 2):
        net = Sequential(kind(5, layers=2, bidirectional=True, dropout=0.4, name="a"))
        model = Model(net, (6, 4), backend="cpu", recompute=recompute, input_gradient=True)
        context = StepContext(training=True, samples=np.arange(3))
        _, saved = model.forward(x, context)
        grads.append([model.backward(dy, saved), *(p.grad for p in model.parameters.values())])
    for one, other in zip(*grads, strict=True):
        np.testing.assert_array_equal(one, other)

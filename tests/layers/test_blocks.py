"""Blocks: what they wire, and what the layers within are called."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.layers import (
    Add,
    Block,
    Branches,
    Concat,
    Conv2d,
    Flatten,
    Identity,
    Linear,
    ReLU,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.model.graph import Graph, Node


def names(net: Block, shape: tuple[int, ...] = (4,)) -> list[str]:
    return [str(layer.name) for layer in Model(net, shape, backend="numpy").layers]


def test_layers_are_called_by_their_class_and_place() -> None:
    net = Sequential(Linear(3), Sequential(Linear(3), ReLU()), Linear(2))
    assert names(net) == ["linear0", "sequential1.linear0", "sequential1.relu1", "linear2"]


def test_given_names_win_and_an_empty_one_adds_nothing() -> None:
    inner = Sequential(Linear(3, name="fc"), ReLU(), name="head")
    hidden = Sequential(ReLU(name="last"), name="")
    assert names(Sequential(inner, hidden)) == ["head.fc", "head.relu1", "last"]
    assert names(Sequential(Linear(3, name="1"), name="0")) == ["0.1"]


def test_the_parts_of_residual_and_branches_have_names_of_their_own() -> None:
    net = Sequential(Residual(Linear(4)), Residual(Linear(3), Linear(3), name="down"))
    assert names(net) == [
        "residual0.body",
        "residual0.add",
        "down.body",
        "down.shortcut",
        "down.add",
    ]
    net = Branches(Linear(2), Sequential(Linear(3), ReLU()), merge=Concat())
    assert names(net) == ["linear0", "sequential1.linear0", "sequential1.relu1", "merge"]


def test_a_single_layer_is_a_net() -> None:
    assert names(Linear(3)) == ["linear"]  # type: ignore[arg-type]


def test_residual_adds_its_input() -> None:
    model = Model(Residual(Linear(3, initializer="zeros")), (3,), backend="numpy")
    x = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(model.predict(x), x)


def test_branches_see_the_same_input() -> None:
    model = Model(Branches(Identity(), Identity(), merge=Concat()), (2,), backend="numpy")
    np.testing.assert_array_equal(model.predict(np.array([[1, 2]])), [[1, 2, 1, 2]])


def test_a_branch_may_have_several_outputs() -> None:
    class Twice(Block):
        def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
            return graph.add(Linear(2), *inputs, label="0"), graph.add(
                Linear(2), *inputs, label="1"
            )

    assert Model(Branches(Twice(), Linear(2), merge=Add()), (3,), backend="numpy").output_shape == (
        2,
    )
    assert Model(Sequential(Twice(), Add(), ReLU()), (3,), backend="numpy").output_shape == (2,)


class TwoHeads(Block):
    """A trunk with an auxiliary classifier half way: two outputs."""

    def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
        trunk = graph.add(Linear(5), *inputs, label="trunk")
        half = graph.add(ReLU(), trunk, label="half")
        return graph.add(Linear(3), half, label="main"), graph.add(Linear(2), trunk, label="side")


def test_a_block_may_take_several_inputs_and_give_several_outputs() -> None:
    net = Sequential(Concat(), TwoHeads(name="net"))
    model = Model(net, [(2,), (3,)], backend="numpy", dtype="float64", input_gradient=True)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(4, 2)), rng.normal(size=(4, 3))
    (main, side), residuals = model.forward(xs, StepContext(training=True))
    assert main.shape == (4, 3)
    assert side.shape == (4, 2)
    dys = rng.normal(size=main.shape), rng.normal(size=side.shape)
    dx, _ = model.backward(dys, residuals)

    def loss(moved: np.ndarray) -> float:
        outputs, _ = model.forward((moved, xs[1]), StepContext(training=True))
        return sum(float((y * dy).sum()) for y, dy in zip(outputs, dys, strict=True))

    direction = rng.normal(size=xs[0].shape)
    step = 1e-6 * direction
    measured = (loss(xs[0] + step) - loss(xs[0] - step)) / 2e-6
    # the error of central differences, 1e-16 / 1e-6 and (1e-6)^2, is below 1e-9
    assert measured == pytest.approx((dx * direction).sum(), rel=1e-7)
    predicted = model.predict(xs, batch_size=3)
    np.testing.assert_allclose(predicted[0], main, rtol=1e-12)
    np.testing.assert_allclose(predicted[1], side, rtol=1e-12)


def test_shapes_that_do_not_meet_in_add_name_the_layers() -> None:
    net = Sequential(Residual(Sequential(Conv2d(8, 3, stride=2), ReLU(name="act")), name="block1"))
    sentence = (
        r"block1\.add \(fed by block1\.body\.act and input0\): Add: .*\(3, 3, 8\) and \(8, 8, 8\)"
    )
    with pytest.raises(ValueError, match=sentence):
        Model(net, (8, 8, 8), backend="numpy")


def test_errors_name_the_layer_within_its_blocks() -> None:
    net = Sequential(Flatten(), Sequential(ReLU(), Conv2d(3, 3), name="features"))
    with pytest.raises(ValueError, match=r"^features\.conv2d1: Conv2d: expected an input of shape"):
        Model(net, (8, 8, 1), backend="numpy")


def test_blocks_without_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="Sequential: expected at least one layer"):
        Sequential()
    with pytest.raises(ValueError, match="Branches: expected at least two parts"):
        Branches(Linear(2), merge=Add())

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
    Identity,
    Linear,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.model.graph import Graph, Node
from tests.each import each


def inner() -> Sequential:
    return Sequential(Linear(3), ReLU())


@each(
    ("net", "names"),
    [
        (Sequential(Linear(3), inner(), Linear(2)), "linear0 sequential1.linear0 .relu1 linear2"),
        (Sequential(Linear(3, name="1"), name="0"), "0.1"),
        (Sequential(Sequential(ReLU(name="last"), name=""), Linear(3, name="fc")), "last fc"),
        (Residual(Linear(4)), "body add"),
        (Sequential(Residual(Linear(3), Linear(3), name="a")), "a.body a.shortcut a.add"),
        (Branches(Linear(2), inner(), merge=Concat()), "linear0 sequential1.linear0 .relu1 merge"),
        (Linear(3), "linear"),
    ],
)
def test_layers_are_called_by_their_class_and_place_unless_named(net, names):
    layers = [str(layer.name) for layer in Model(net, (4,), backend="numpy").layers]
    assert layers == names.replace(" .", " sequential1.").split()


@each(
    ("net", "expected"),
    [
        (Residual(Linear(2, initializer="zeros")), [1, 2]),
        (Branches(Identity(), Linear(2, initializer="zeros"), merge=Concat()), [1, 2, 0, 0]),
    ],
)
def test_all_parts_read_the_same_input(net, expected):
    model = Model(net, (2,), backend="numpy")
    np.testing.assert_array_equal(model.predict(np.array([[1, 2]])), [expected])


def test_a_branch_may_have_several_outputs():
    class Twice(Block):
        def wire(self, graph: Graph, *inputs: Node) -> tuple[Node, ...]:
            return graph.add(Linear(2), *inputs, label="0"), graph.add(
                Linear(2), *inputs, label="1"
            )

    assert Model(Branches(Twice(), Linear(2), merge=Add()), (3,), backend="numpy").output_shape == (
        2,
    )
    assert Model(Sequential(Twice(), Add(), ReLU()), (3,), backend="numpy").output_shape == (2,)


def test_shapes_that_do_not_meet_in_add_name_the_layers():
    net = Sequential(Residual(Sequential(Conv2d(8, 3, stride=2), ReLU(name="act")), name="block1"))
    sentence = (
        r"block1\.add \(fed by block1\.body\.act and input0\): Add: .*\(3, 3, 8\) and \(8, 8, 8\)"
    )
    with pytest.raises(ValueError, match=sentence):
        Model(net, (8, 8, 8), backend="numpy")


def test_blocks_without_parts_are_refused():
    with pytest.raises(ValueError, match="Sequential: expected at least one layer"):
        Sequential()
    with pytest.raises(ValueError, match="Branches: expected at least two parts"):
        Branches(Linear(2), merge=Add())

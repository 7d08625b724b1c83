"""The graph: names, uses, who needs a gradient, and who may write over whose memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import (
    Add,
    Branches,
    Concat,
    Flatten,
    Identity,
    Linear,
    MultiHeadAttention,
    ReLU,
    Residual,
    Sequential,
    StepContext,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.model.graph import Graph, Node
from tests.each import each
from tests.model.networks import IMAGE, NETS, Wired, assert_same, passes


def test_a_layer_belongs_to_one_model():
    net = Sequential(Linear(3))
    Model(net, (3,), backend="numpy")
    with pytest.raises(ValueError, match="expected a new Linear, got linear0 of another"):
        Model(net, (3,), backend="numpy")


@each(
    ("net", "words"),
    [
        (lambda: Sequential(ReLU), "expected a layer or a block, not a class, got .*ReLU"),
        (lambda: Sequential(ReLU(name="a"), ReLU(name="a")), "a: names of layers must be unique"),
        (
            lambda: Wired(
                lambda graph, x: graph.add(Sequential(ReLU(name="a"), ReLU(name="a")), x)
            ),
            "a: names of layers must be unique, got two; rename",
        ),
    ],
)
def test_names_are_unique_and_layers_are_instances(net, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Model(net(), (3,), backend="numpy")


def test_names_within_unnamed_blocks_added_by_hand_are_numbered():
    def wire(graph: Graph, x: Node) -> Node:
        for _ in range(2):
            body = Sequential(Linear(3, name="fc"), ReLU())
            x = graph.add(Residual(body), graph.add(MultiHeadAttention(1), x))
        return x

    names = [layer.name for layer in Model(Wired(wire), (4, 3), backend="numpy", fuse=False).layers]
    once = ["in_proj", "attention", "out_proj", "body.fc", "body.relu1", "add"]
    assert names == [*once, *(f"{name}_1" for name in once)]


def test_a_number_that_is_a_name_already_is_left_out():
    def wire(graph: Graph, x: Node) -> Node:
        x = graph.add(ReLU(name="relu_1"), graph.add(ReLU(), x))
        return graph.add(ReLU(), x)

    model = Model(Wired(wire), (3,), backend="numpy")
    assert [layer.name for layer in model.layers] == ["relu", "relu_1", "relu_2"]


def test_an_output_that_nobody_reads_is_refused():
    def wire(graph: Graph, x: Node) -> Node:
        graph.add(Linear(3, name="lost"), x)
        return graph.add(Linear(2), x)

    with pytest.raises(ValueError, match="lost: the output of this layer is not used"):
        Model(Wired(wire), (3,), backend="numpy")
    with pytest.raises(ValueError, match="input1: the output of this layer is not used"):
        Model(Wired(lambda graph, x, _: graph.add(Linear(2), x)), [(3,), (3,)], backend="numpy")


class Declares(Identity):
    """A layer of a user's own that declares what it is told."""

    def __init__(self, names: str, shape: Any, early: bool = False) -> None:
        super().__init__()
        self.names, self.shape = names, shape
        if early:
            self.build()

    def build(self, *shapes: Any) -> Any:
        for name in self.names:
            self.parameter(name, (2,), "ones")
        return self.shape


@each("shape", [None, [2], (2.0,)])
def test_a_build_that_does_not_return_a_shape_is_told(shape):
    with pytest.raises(ValueError, match="Declares: build must return the output shape as a tuple"):
        Model(Sequential(Declares("", shape), Linear(2)), (2,), backend="numpy")


def test_parameters_have_different_names_and_are_declared_in_build():
    Model(Declares("ab", (2,)), (2,), backend="numpy")
    with pytest.raises(
        ValueError, match="declares: Declares: names of parameters must be unique, got b twice; ren"
    ):
        Model(Declares("abb", (2,)), (2,), backend="numpy")
    with pytest.raises(ValueError, match="Declares: parameter a must be declared in build, not in"):
        Declares("a", (2,), early=True)


def test_only_what_lies_behind_parameters_needs_a_gradient():
    net = Sequential(Flatten(), Tanh(), Linear(3), ReLU(), Linear(2))
    needs = [layer.needs_dx for layer in Model(net, (3,), backend="numpy").layers]
    assert needs == [False, False, False, True, True]
    model = Model(Sequential(Tanh(), Linear(3)), (3,), backend="numpy", input_gradient=True)
    assert all(layer.needs_dx for layer in model.layers)


@each(
    ("net", "forward", "backward"),
    [
        ((Linear(3), ReLU(), Linear(3)), "relu1", "relu1"),
        ((ReLU(), Linear(3), ReLU()), "relu2", "relu0"),  # not the batch, not dy of the output
        ((Linear(3), Tanh(), ReLU(), Linear(3)), "tanh1", "tanh1 relu2"),  # Tanh keeps its output
        (
            (Linear(3), Residual(Sequential(ReLU(), Linear(3))), Linear(2)),  # two readers
            "residual1.add",
            "residual1.body.relu0",
        ),
        ((Linear(3), Identity(), ReLU(), Linear(3)), "", "relu2"),  # of a view
        ((Linear(3), ReLU(), Flatten(), Linear(3)), "relu1", "relu1"),
        # Tanh and ReLU receive one and the same array from a sum
        ((Linear(3), Branches(Tanh(), ReLU(), merge=Add()), Linear(3)), "", ""),
        (
            (Linear(3), Branches(Tanh(), ReLU(), merge=Concat()), Linear(3)),
            "",
            "branches1.tanh0 branches1.relu1",
        ),
    ],
)
def test_layers_work_in_place_on_arrays_that_nothing_else_reads(net, forward, backward):
    layers = Model(Sequential(*net), (3,), backend="numpy").layers
    assert [layer.name for layer in layers if layer.overwrites_input] == forward.split()
    assert [layer.name for layer in layers if layer.overwrites_dy] == backward.split()


@pytest.mark.few(12)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("input_gradient", [True, False])
def test_working_in_place_changes_no_result(name, training, input_gradient, backend):
    def build() -> Model:
        options: Any = {"backend": backend, "dtype": "float64", "input_gradient": input_gradient}
        return Model(NETS[name](), IMAGE, fuse=False, **options)

    careful = build()
    for layer in careful.layers:
        layer.overwrites_input = layer.overwrites_dy = False
    # the same operations in the same order, at other addresses
    assert_same(passes(build(), training=training), passes(careful, training=training), 1e-12)


def test_arrays_between_layers_have_the_models_dtype_and_c_order(backend):
    model = Model(NETS["undeclared"](), IMAGE, backend=backend)
    seen = []

    def look(node: Node, y: np.ndarray) -> None:
        seen.append((y.dtype.name, y.flags.c_contiguous))

    x = backend.asarray(np.ones((2, *IMAGE), "float32"))
    model.forward(x, StepContext(training=True), after_node=look)
    assert set(seen) == {("float32", True)}

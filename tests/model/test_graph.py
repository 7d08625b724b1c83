"""The graph: names, uses, who needs a gradient, and who may write over whose memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    Identity,
    Layer,
    Linear,
    MaxPool2d,
    MultiHeadAttention,
    ReLU,
    Reshape,
    Residual,
    Sequential,
    StepContext,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.model.graph import Graph, Node
from tests.each import each
from tests.gpu import to_host


class Wired(Block):
    """A block made of a function."""

    def __init__(self, wire: Callable[..., Any]) -> None:
        self.function = wire

    def wire(self, graph: Graph, *inputs: Node) -> Any:
        return self.function(graph, *inputs)


def test_a_layer_belongs_to_one_model() -> None:
    net = Sequential(Linear(3))
    Model(net, (3,), backend="numpy")
    with pytest.raises(ValueError, match="expected a new Linear, got linear0 of another"):
        Model(net, (3,), backend="numpy")


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="fc: names of layers must be unique, got two; rename one"):
        Model(Sequential(Linear(3, name="fc"), Linear(3, name="fc")), (3,), backend="numpy")


class Pairs(Block):
    """Unnamed parts, added by hand without labels."""

    def wire(self, graph: Graph, *inputs: Node) -> Node:
        a = graph.add(Linear(3), *inputs)
        b = graph.add(Linear(3), *inputs)
        for _ in range(2):
            a = graph.add(Sequential(Linear(3), ReLU()), a)
        return graph.add(Add(), a, graph.add(Linear(3, name="last"), b))


def test_unnamed_layers_added_by_hand_are_numbered_where_names_would_be_equal() -> None:
    model = Model(Pairs(), (3,), backend="numpy", fuse=False)
    names = "linear linear_1 linear0 relu1 linear0_1 relu1_1 last add"
    assert [layer.name for layer in model.layers] == names.split()


def test_names_within_unnamed_blocks_added_by_hand_are_numbered_too() -> None:
    def wire(graph: Graph, x: Node) -> Node:
        for _ in range(2):
            body = Sequential(Linear(3, name="fc"), ReLU())
            x = graph.add(Residual(body), graph.add(MultiHeadAttention(1), x))
        return x

    names = [layer.name for layer in Model(Wired(wire), (4, 3), backend="numpy", fuse=False).layers]
    once = ["in_proj", "attention", "out_proj", "body.fc", "body.relu1", "add"]
    assert names == [*once, *(f"{name}_1" for name in once)]


def test_two_layers_of_one_name_in_one_unnamed_block_are_refused() -> None:
    def wire(graph: Graph, x: Node) -> Node:
        return graph.add(Sequential(Linear(3, name="own"), Linear(3, name="own")), x)

    with pytest.raises(ValueError, match="own: names of layers must be unique, got two; rename"):
        Model(Wired(wire), (3,), backend="numpy")


def test_a_number_that_is_a_name_already_is_left_out() -> None:
    def wire(graph: Graph, x: Node) -> Node:
        x = graph.add(ReLU(name="relu_1"), graph.add(ReLU(), x))
        return graph.add(ReLU(), x)

    model = Model(Wired(wire), (3,), backend="numpy")
    assert [layer.name for layer in model.layers] == ["relu", "relu_1", "relu_2"]


def test_an_output_that_nobody_reads_is_refused() -> None:
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
def test_a_build_that_does_not_return_a_shape_is_told(shape: Any) -> None:
    with pytest.raises(ValueError, match="Declares: build must return the output shape as a tuple"):
        Model(Sequential(Declares("", shape), Linear(2)), (2,), backend="numpy")


def test_parameters_have_different_names_and_are_declared_in_build() -> None:
    Model(Declares("ab", (2,)), (2,), backend="numpy")
    with pytest.raises(
        ValueError, match="declares: Declares: names of parameters must be unique, got b twice; ren"
    ):
        Model(Declares("abb", (2,)), (2,), backend="numpy")
    with pytest.raises(ValueError, match="Declares: parameter a must be declared in build, not in"):
        Declares("a", (2,), early=True)


def test_a_class_in_the_place_of_a_layer_is_told() -> None:
    with pytest.raises(TypeError, match=r"expected a layer or a block, not a class, got .*ReLU"):
        Model(Sequential(ReLU), (3,), backend="numpy")  # type: ignore[arg-type]


def test_only_what_lies_behind_parameters_needs_a_gradient() -> None:
    net = Sequential(Flatten(), Tanh(), Linear(3), ReLU(), Linear(2))
    needs = [layer.needs_dx for layer in Model(net, (3,), backend="numpy").layers]
    assert needs == [False, False, False, True, True]


def test_every_layer_needs_a_gradient_if_the_input_does() -> None:
    model = Model(Sequential(Tanh(), Linear(3)), (3,), backend="numpy", input_gradient=True)
    assert all(layer.needs_dx for layer in model.layers)


def in_place(net: Block | Layer, shape: tuple[int, ...] = (3,)) -> tuple[list[str], list[str]]:
    """The names of the layers that overwrite their input, and of those that overwrite dy."""
    layers = Model(net, shape, backend="numpy").layers
    forward = [str(layer.name) for layer in layers if layer.overwrites_input]
    return forward, [str(layer.name) for layer in layers if layer.overwrites_dy]


def test_activations_work_in_place_on_new_arrays() -> None:
    net = Sequential(Linear(3), ReLU(), Linear(3))
    assert in_place(net) == (["relu1"], ["relu1"])


def test_the_batch_and_the_gradient_of_the_output_are_never_overwritten() -> None:
    forward, backward = in_place(Sequential(ReLU(), Linear(3), ReLU()))
    assert "relu0" not in forward
    assert "relu2" not in backward


def test_an_output_that_its_maker_keeps_is_not_overwritten() -> None:
    assert in_place(Sequential(Linear(3), Tanh(), ReLU(), Linear(3)))[0] == ["tanh1"]


def test_an_output_with_two_readers_is_not_overwritten() -> None:
    net = Sequential(Linear(3), Residual(Sequential(ReLU(), Linear(3))), Linear(2))
    forward, _ = in_place(net)
    assert forward == ["residual1.add"]


def test_a_view_of_an_output_is_not_overwritten() -> None:
    for view in (Identity(), Flatten(), Dropout(0.5)):
        net = Sequential(Linear(3), view, ReLU(), Linear(3))
        assert "relu2" not in in_place(net)[0]


def test_gradients_pass_through_views_but_not_through_sums() -> None:
    net = Sequential(Linear(3), ReLU(), Flatten(), Linear(3))
    assert in_place(net)[1] == ["relu1"]
    net = Sequential(Linear(3), Branches(Tanh(), ReLU(), merge=Add()), Linear(3))
    assert in_place(net)[1] == []  # Tanh and ReLU receive one and the same array
    net = Sequential(Linear(3), Branches(Tanh(), ReLU(), merge=Concat()), Linear(3))
    assert in_place(net)[1] == ["branches1.tanh0", "branches1.relu1"]


class PassesDy(Layer):
    """Identity of a user who declares nothing, and returns dy itself and the input itself."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0], None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy


class Transposed(Layer):
    """Swaps the first two axes of each sample: its arrays are not in C order."""

    def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (h, w, c) = self.single(shapes)
        return w, h, c

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0].swapaxes(1, 2), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy.swapaxes(1, 2)


class Spread(Layer):
    """The mean over each image; its gradient is one number seen from everywhere, read-only."""

    def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return self.single(shapes)[-1:]

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0].mean(axis=(1, 2)), None

    def backward(self, dy: Any, saved: Any) -> Any:
        h, w, c = self.input_shapes[0]
        return np.broadcast_to(dy[:, None, None] / (h * w), (len(dy), h, w, c))


class Doubles(Layer):
    """A user who takes 64-bit numbers in passing."""

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return xs[0] * np.float64(2), None

    def backward(self, dy: Any, saved: Any) -> Any:
        return dy * np.float64(2)


def conv() -> Conv2d:
    return Conv2d(3, 3, padding=1)


NETS: dict[str, Callable[[], Block]] = {
    "a chain": lambda: Sequential(conv(), BatchNorm(), ReLU(), conv(), ReLU(), Tanh(), conv()),
    "residuals": lambda: Sequential(
        conv(),
        *(Residual(Sequential(conv(), BatchNorm(), ReLU(), conv())) for _ in range(2)),
        ReLU(),
        Residual(Sequential(ReLU(), conv()), conv()),
        ReLU(),
    ),
    "a residual of activations alone": lambda: Sequential(
        conv(), Residual(Sequential(ReLU(), Tanh())), Residual(ReLU()), ReLU(), conv()
    ),
    "branches": lambda: Sequential(
        conv(),
        Branches(ReLU(), Identity(), Sequential(BatchNorm(), ReLU()), Tanh(), merge=Add()),
        Branches(Identity(), ReLU(), Flatten(), merge=Flat()),
        Tanh(),
        Linear(4),
    ),
    "views": lambda: Sequential(
        conv(), Identity(), Dropout(0.4), ReLU(), Dropout(0.4), Dropout(0.0), MaxPool2d(2),
        Flatten(), Identity(), ReLU(), Linear(6), Dropout(0.3), ReLU(), Linear(2),
    ),
    "a view with two readers": lambda: Sequential(
        conv(), Identity(), Residual(ReLU()), Identity(), Residual(Tanh()), Flatten(), Linear(3)
    ),
    "a view beside another reader": lambda: Sequential(
        Identity(),
        ReLU(),
        conv(),
        Branches(Sequential(Identity(), ReLU()), Reshape((4, 4, 3)), merge=Add()),
        Branches(Sequential(PassesDy(), ReLU()), Tanh(), merge=Add()),
        BatchNorm(),
    ),
    "layers that declare nothing": lambda: Sequential(
        conv(), PassesDy(), ReLU(), PassesDy(), Residual(Sequential(PassesDy(), ReLU())), conv(),
        ReLU(), Transposed(), conv(), BatchNorm(), Transposed(), ReLU(), Doubles(), conv(), ReLU(),
        Spread(), ReLU(), Linear(2),
    ),
    "a merge of one array with itself": lambda: Sequential(
        conv(),
        ReLU(),
        Wired(lambda graph, x: graph.add(Add(), x, x)),
        ReLU(),
        Wired(lambda graph, x: graph.add(Concat(), x, x, x)),
        BatchNorm(),
    ),
}  # fmt: skip


class Flat(Concat):
    """Concatenates inputs of any shape."""

    views = ()

    def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        self.shapes = shapes
        return super().build(*((int(np.prod(s)),) for s in shapes))

    def forward(self, *xs: Any, context: StepContext) -> Any:
        return super().forward(*(x.reshape(len(x), -1) for x in xs), context=context)

    def backward(self, dy: Any, saved: Any) -> Any:
        parts = super().backward(dy, saved)
        return tuple(p.reshape(len(p), *s) for p, s in zip(parts, self.shapes, strict=True))


def step(model: Model, training: bool) -> list[np.ndarray]:
    """Outputs, gradients of the input and of all parameters; the batch and dy must survive."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 4, 3)).astype(model.dtype)
    context = StepContext(training=training, samples=np.arange(3))
    given = model.backend.asarray(x.copy())
    y, residuals = model.forward(given, context)
    y_before, dy = to_host(y), rng.normal(size=y.shape).astype(model.dtype)
    given_dy = model.backend.asarray(dy.copy())
    dx = model.backward(given_dy, residuals)
    for now, before in ((given, x), (given_dy, dy), (y, y_before)):
        np.testing.assert_array_equal(to_host(now), before)
    gradients = [p.grad for p in model.parameters.values()]
    return [to_host(array) for array in (y, dx, *gradients) if array is not None]


@pytest.mark.few(24)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("input_gradient", [True, False])
def test_working_in_place_changes_no_result(
    name: str, training: bool, input_gradient: bool, backend: Backend
) -> None:
    def build() -> Model:
        return Model(
            NETS[name](), (4, 4, 3), backend=backend, dtype="float64", input_gradient=input_gradient
        )

    careful = build()
    for layer in careful.layers:
        layer.overwrites_input = layer.overwrites_dy = False
    for got, want in zip(step(build(), training), step(careful, training), strict=True):
        # the same operations in the same order, at other addresses
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_gradients_of_outputs_that_other_layers_read_are_not_overwritten(backend: Backend) -> None:
    def wire(graph: Graph, x: Node) -> tuple[Node, ...]:
        first = graph.add(Linear(3), x)
        second = graph.add(Tanh(), first)
        both = graph.add(Linear(3), graph.add(Add(), first, second))
        return first, second, both, graph.add(Linear(3), second)

    model = Model(Wired(wire), (3,), backend=backend, dtype="float64")
    x = backend.asarray(np.ones((2, 3)))
    ys, residuals = model.forward(x, StepContext(training=True))
    given = [np.random.default_rng(i).normal(size=(2, 3)) for i in range(len(ys))]
    dys = tuple(map(backend.asarray, [dy.copy() for dy in given]))
    model.backward(dys, residuals)
    for dy, before in zip(dys, given, strict=True):
        np.testing.assert_array_equal(to_host(dy), before)


def test_arrays_between_layers_have_the_models_dtype_and_c_order(backend: Backend) -> None:
    model = Model(NETS["layers that declare nothing"](), (4, 4, 3), backend=backend)
    seen = []

    def look(node: Node, y: np.ndarray) -> None:
        seen.append((y.dtype.name, y.flags.c_contiguous))

    x = backend.asarray(np.ones((2, 4, 4, 3), "float32"))
    model.forward(x, StepContext(training=True), after_node=look)
    assert set(seen) == {("float32", True)}

"""What every layer has: a cost, an error with its name, defaults that are safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import layers as nn
from pydtnn.model import Model
from tests.each import each

FROZEN: dict[str, Callable[[], tuple[nn.Layer, tuple[int, ...]]]] = {
    "token": lambda: (nn.ClassToken(), (3, 5)),
    "positions": lambda: (nn.PositionalEmbedding(), (3, 5)),
    "linear": lambda: (nn.Linear(3), (5,)),
    "convolution": lambda: (nn.Conv2d(3, 1), (5, 5, 4)),
    "transposed": lambda: (nn.ConvTranspose2d(2, 2), (2, 2, 2)),
}


class Minimal(nn.Layer):
    """All that a user must write."""

    def forward(self, x: Any, context: nn.StepContext) -> Any:  # type: ignore[override]
        return 3 * x, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return 3 * dy


def test_two_methods_make_a_layer():
    model = Model(nn.Sequential(nn.Linear(4), Minimal(name="triple")), (2,), backend="numpy")
    assert model.layers[1].name == "triple"
    assert model.output_shape == (4,)
    x = np.ones((3, 2), "float32")
    w = model.parameters["linear0.w"].value
    np.testing.assert_allclose(model.predict(x), 3 * x @ w.T, rtol=1e-6)
    assert model.layers[1].cost(2)[:3] == (8, 8, 2 * 8 * 4)


@each(("shape", "fan_in", "fan_out"), [((6,), 1, 1), ((3, 5), 5, 3), ((8, 3, 2, 4), 24, 48)])
def test_the_fans_of_a_parameter_are_by_default_those_of_a_matrix_or_of_filters(
    shape, fan_in, fan_out
):
    class Holds(Minimal):
        def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
            self.first = self.parameter("first", shape, "ones")
            self.second = self.parameter("second", shape, "ones", fan_in=7, fan_out=9)
            return shapes[0]

    layer = Holds()
    Model(layer, (2,), backend="numpy")
    assert (layer.first.fan_in, layer.first.fan_out) == (fan_in, fan_out)
    assert (layer.second.fan_in, layer.second.fan_out) == (7, 9)


@each("kind", FROZEN)
def test_frozen_layers_pass_gradients_on_and_cost_less(kind):
    layer, shape = FROZEN[kind]()
    net = nn.Sequential(nn.Linear(shape[-1], name="before"), layer)
    model = Model(net, shape, backend="cpu", dtype="float64", fuse=False)
    name = str(layer.name)
    before = model.layers[name].cost(2)
    model.freeze(name)
    after = model.layers[name].cost(2)
    assert after.flops_forward == before.flops_forward
    assert after.flops_backward < before.flops_backward
    assert after.bytes_backward < before.bytes_backward
    y, saved = model.forward(np.ones((2, *shape)), nn.StepContext(training=True))
    model.backward(np.ones_like(y), saved)
    assert model.parameters["before.w"].grad.any()


class Former(nn.ReLU):
    takes_16_bits, new_output, only_kernels, may_overwrite_dy = False, True, True, False


def test_former_flags_of_layers_are_what_a_layer_declares_now():
    assert set(Former.supports) == {"replay", "recomputing"}
    assert (Former.new_results, Former.may_overwrite) == (("gradient", "output"), ("input",))
    layer = Former()
    layer.penalises = True
    assert "penalties" in layer.supports
    assert layer.penalises
    assert not Former.penalises
    with pytest.raises(TypeError, match=r"^Wrong: only_kernels must be a bool; set supports in b"):
        type("Wrong", (nn.Layer,), {"only_kernels": property(lambda self: True)})


def test_a_subclass_that_overrides_a_pass_is_neither_repeated_nor_recomputed_unless_it_says_so():
    class Options(nn.GELU):
        def cost(self, batch: int) -> nn.Cost:
            return super().cost(2 * batch)

    class Helper(nn.GELU):
        def _apply(self, x: Any, out: Any) -> Any:
            return super()._apply(x, out)

    class Pass(nn.GELU):
        def backward(self, dy: Any, saved: Any) -> Any:
            return super().backward(dy, saved)

    assert Options.supports == nn.GELU.supports == ("16 bits", "recomputing", "replay")
    assert Helper.supports == ("16 bits", "recomputing")

    class Filters(nn.Conv2d):
        def forward(self, *xs: Any, context: nn.StepContext) -> Any:
            return super().forward(*xs, context=context)

    class Exact(Filters):
        takes_16_bits = True

        def forward(self, *xs: Any, context: nn.StepContext) -> Any:
            return super().forward(*xs, context=context)

    assert Pass.supports == ("16 bits",)
    assert (Filters.supports, Exact.supports) == ((), ("16 bits",))

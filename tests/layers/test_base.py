"""What every layer has: a cost, an error with its name, defaults that are safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import Conv2d, Layer, Linear, Sequential, StepContext
from pydtnn.model import Model
from tests.each import each


class Minimal(Layer):
    """All that a user must write."""

    def forward(self, x: Any, context: StepContext) -> Any:  # type: ignore[override]
        return 3 * x, None

    def backward(self, dy: Any, saved: Any) -> Any:
        return 3 * dy


def test_two_methods_make_a_layer() -> None:
    model = Model(Sequential(Linear(4), Minimal(name="triple")), (2,), backend="numpy")
    assert model.layers[1].name == "triple"
    assert model.output_shape == (4,)
    x = np.ones((3, 2), "float32")
    w = model.parameters["linear0.w"].value
    np.testing.assert_allclose(model.predict(x), 3 * x @ w.T, rtol=1e-6)


def test_a_layer_that_declares_nothing_is_never_used_in_place() -> None:
    model = Model(Sequential(Linear(4), Minimal(), Linear(2)), (2,), backend="numpy")
    assert not model.layers[1].overwrites_input
    assert not model.layers[1].overwrites_dy
    assert model.layers[1].saves == ("input", "output")


def test_the_cost_of_a_convolution_counts_every_product_and_sum() -> None:
    net = Sequential(Conv2d(4, 3, padding=1), Conv2d(8, 3, stride=2, groups=2))
    first, second = Model(net, (9, 9, 3), backend="numpy").layers
    assert first.cost(5).flops_forward == 2 * 5 * 81 * 4 * 27
    assert first.cost(5).flops_backward == first.cost(5).flops_forward + 5 * 81 * 4  # no dx; db
    assert second.cost(5).flops_forward == 2 * 5 * 16 * 8 * 18
    assert second.cost(5).flops_backward == 2 * second.cost(5).flops_forward + 5 * 16 * 8


def test_the_cost_of_a_linear_layer_counts_bytes_too() -> None:
    (layer,) = Model(Linear(3), (2, 5), backend="numpy", dtype="float64").layers
    cost = layer.cost(4)
    assert cost.flops_forward == 2 * (4 * 2) * 3 * 5
    assert cost.bytes_forward == 8 * (4 * 2 * 5 + 4 * 2 * 3 + 3 * 5)


def test_an_elementwise_layer_reads_and_writes_each_element_once() -> None:
    (layer,) = Model(Minimal(), (6,), backend="numpy").layers
    assert layer.cost(2)[:3] == (12, 12, 2 * 12 * 4)


def test_too_few_axes_are_told() -> None:
    with pytest.raises(ValueError, match=r"Linear: expected an input of at least 1 axes besides"):
        Model(Linear(3), (), backend="numpy")


@each(("shape", "fan_in", "fan_out"), [((6,), 1, 1), ((3, 5), 5, 3), ((8, 3, 2, 4), 24, 48)])
def test_the_fans_of_a_parameter_are_by_default_those_of_a_matrix_or_of_filters(
    shape: tuple[int, ...], fan_in: int, fan_out: int
) -> None:
    class Holds(Minimal):
        def build(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
            self.first = self.parameter("first", shape, "ones")
            self.second = self.parameter("second", shape, "ones", fan_in=7, fan_out=9)
            return shapes[0]

    layer = Holds()
    Model(layer, (2,), backend="numpy")
    assert (layer.first.fan_in, layer.first.fan_out) == (fan_in, fan_out)
    assert (layer.second.fan_in, layer.second.fan_out) == (7, 9)

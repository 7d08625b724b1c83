"""Work of layers, for traces."""

from __future__ import annotations

from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.model.summary import layer_costs


def test_the_work_of_every_layer_is_that_of_the_samples() -> None:
    model = Model(Sequential(Linear(4, name="fc"), ReLU(name="relu")), (3,), backend="numpy")
    costs = layer_costs(model, 10)
    assert list(costs) == ["fc", "relu"]
    fc = model.layers["fc"].cost(10)
    assert costs["fc"] == {
        "type": "Linear",
        "parameters": 16,
        "forward_flops": fc.flops_forward,
        "backward_flops": fc.flops_backward,
        "forward_bytes": fc.bytes_forward,
        "backward_bytes": fc.bytes_backward,
    }
    assert layer_costs(model, 20)["fc"]["forward_flops"] == 2 * costs["fc"]["forward_flops"] > 0
    assert costs["relu"]["parameters"] == 0

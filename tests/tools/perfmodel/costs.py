"""Costs of compute for the tests of the closed forms."""

from pydtnn.layers.base import Layer
from pydtnn.model.summary import local_samples
from pydtnn.tools.perfmodel.compute import ComputeCosts, Label


class PerFlop(ComputeCosts):
    """A constant per pass, and a rate for the operations of a layer."""

    def __init__(self, call: float = 1e-5, rate: float = 1e10) -> None:
        self.call, self.rate = call, rate

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        if label.index or layer is None:
            return 0.0
        cost = layer.cost(local_samples(layer, batch))
        flops = cost.flops_forward if label.kind == "forward" else cost.flops_backward
        return self.call + flops / self.rate

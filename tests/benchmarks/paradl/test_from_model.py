from __future__ import annotations

from benchmarks.paradl import Case, project
from benchmarks.paradl.from_model import layers_of
from pydtnn import Model
from pydtnn.layers import Layer
from pydtnn.models import create_net
from pydtnn.tools.perfmodel.compute import ComputeCosts, Label


class Proportional(ComputeCosts):
    """Times in proportion to the size of the output."""

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        assert layer is not None
        return batch * 1e-9 * layer.output_shape[-1] * (1 + (label.kind == "backward"))


def test_the_layers_of_a_model_are_those_of_its_graph(abci):
    model = Model(create_net("vgg11_bn", 10, (32, 32, 3)), (32, 32, 3), fuse=False)
    net = layers_of(model, 50_000, costs=Proportional(), batch=8)
    first = net.layers[0]
    assert (first.name.split()[0], first.x, first.w, first.y) == (
        "CONV",
        (3, 32, 32),
        (3, 64, 3, 3),
        (64, 32, 32),
    )
    assert {x.name.split()[0] for x in net.layers} >= {"CONV", "BNORM", "RELU", "MPOOL", "FC"}
    biases = sum(p.size for p in model.parameters.values() if p.name.endswith(".b"))
    assert (
        sum(x.items_w for x in net.layers)
        == sum(p.size for p in model.parameters.values()) - biases
    )
    assert (first.forward, first.backward) == (64e-9, 128e-9)
    assert not net.layers[-1].split
    pool = next(x for x in net.layers if x.name.startswith("MPOOL"))
    assert pool.kernel == (2, 2)
    assert project(Case(net, abci, "filter", 4, 64), "corrected").problem == ""

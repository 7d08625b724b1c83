"""Random networks of all layers do what the same networks in PyTorch do, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume

from pydtnn import layers
from pydtnn.layers import Layer, StepContext
from pydtnn.model import Model
from tests.parallel.trajectories import LR, MOMENTUM, STEPS, Data, Expected, Record, randomize
from tests.random_cases import Case
from tests.random_networks import NUMPY, Network, OwnConv, Turned, for_each_network

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")


class Dropped(torch.nn.Module):
    """Drops what our layer drops."""

    context: StepContext

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        from benchmarks.common.torch_twin import to_torch

        mask, _ = self.layer.forward(
            np.ones((len(x), *self.layer.output_shape)), context=self.context
        )
        return x * to_torch(mask)


@pytest.fixture(autouse=True)
def _converters() -> Iterator[None]:
    from benchmarks.common.torch_twin import CONVERTERS, conv, nhwc

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONVERTERS, OwnConv, conv)
        patch.setitem(CONVERTERS, Turned, lambda layer: nhwc(lambda x: x.flip(1)))
        patch.setitem(CONVERTERS, layers.Dropout, Dropped)
        # not in place: PyTorch refuses that behind a view of what backward needs
        patch.setitem(CONVERTERS, layers.ReLU, lambda layer: torch.nn.ReLU())
        yield


class Twin:
    """The PyTorch network of a model, trained as `trajectories.observe` trains a model."""

    def __init__(self, model: Model, network: Network) -> None:
        from benchmarks.common import torch_twin

        self.convert = torch_twin
        self.net = torch_twin.Twin(model)
        self.data = Data(network)
        self.network = network
        self.record: Record = {}
        self.tensors: dict[str, Any] = {}
        for layer, module in zip(self.net.layers, self.net.steps, strict=True):
            self.tensors |= {p.name: tensor for p, tensor in torch_twin.pairs(layer, module)}
            for s in layer.statistics:
                norm = getattr(module, "inner", module)
                norm.running_mean.copy_(torch.from_numpy(s.mean))
                norm.running_var.copy_(torch.from_numpy(s.variance))
                self.tensors[f"{s.name}.running_mean"] = norm.running_mean
                self.tensors[f"{s.name}.running_variance"] = norm.running_var
        self.shapes = {key: array.shape for key, array in model.state().items()}
        self.outputs = [node.shape for node in model.graph.outputs]

    def observe(self) -> Record:
        parameters = list(self.net.parameters())
        optimizer = torch.optim.SGD(parameters, LR, MOMENTUM) if parameters else None
        for step in range(STEPS):
            self.run(f"step{step}.0", step, True)
            if optimizer:
                optimizer.step()
            for key, shape in self.shapes.items():
                self.keep(f"step{step} state {key} ", self.tensors[key], shape)
        self.run("evaluation", 0, False)
        self.run("prediction", 1, False, keep=False)
        return self.record

    def run(self, name: str, step: int, training: bool, keep: bool = True) -> None:
        self.net.train(training)
        self.net.zero_grad()
        for module in self.net.modules():
            if isinstance(module, Dropped):
                module.context = self.data.context(step, training)
        given = [self.convert.to_torch(x).requires_grad_() for x in self.data.inputs(step)]
        ys = self.net(*(x * 1 for x in given))  # a layer may write over its input
        outputs = ys if isinstance(ys, tuple) else (ys,)
        for i, y in enumerate(outputs):
            self.keep(f"{name} y{i}", y)
        if not keep:
            return
        dys = map(self.convert.to_torch, self.data.gradients(step, self.outputs))
        torch.autograd.backward(outputs, tuple(dys))
        if self.network.input_gradient:
            for i, x in enumerate(given):
                self.keep(f"{name} dx{i}", x.grad)
        for key, tensor in self.tensors.items():
            if tensor.requires_grad:
                self.keep(f"{name} gradient {key} ", tensor.grad, self.shapes[key])

    def keep(self, name: str, tensor: Any, shape: tuple[int, ...] | None = None) -> None:
        array = self.convert.to_ours(tensor)
        key = name + "0" if name.endswith(" ") else name
        self.record[key] = (array if shape is None else array.reshape(shape)).copy()


@pytest.mark.fuzz("networks")
def test_a_network_trains_as_in_pytorch(cases):
    def check(case: Case, network: Network) -> None:
        expected = Expected.of(network)
        model = network.model(NUMPY, fuse=False)
        # PyTorch's attention drops others
        assume(not any(getattr(node.layer, "dropout", 0) for node in model.graph.nodes))
        randomize(model, network)
        try:
            record = Twin(model, network).observe()
        except ValueError as error:  # group norm over a single value: PyTorch refuses it
            assume("Expected more than 1 value" not in str(error))
            raise
        case.compare(expected.assert_alike, expected.record, record)

    for_each_network(cases, check)

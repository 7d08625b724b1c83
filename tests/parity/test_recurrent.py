"""Recurrent layers equal PyTorch's: outputs, states and all gradients in float64."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.tools.interchange import import_onnx, load_state_dict, state_dict
from pydtnn.tools.interchange.slots import slots_of
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

KINDS = {"LSTM": layers.LSTM, "GRU": layers.GRU}
SIZES = [(1, 1, 1, 1), (3, 7, 5, 4), (5, 2, 3, 19), (2, 13, 17, 33)]
"""Samples, steps, features of the input and of the state."""

OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "without biases": {"bias": False},
    "two directions": {"bidirectional": True},
    "two layers": {"layers": 2},
    "three layers, two directions": {"layers": 3, "bidirectional": True},
}


def twins(
    kind: str, size: tuple[int, ...], options: dict[str, Any], **ours: Any
) -> tuple[Any, Any]:
    """Our block, and PyTorch's module with random weights."""
    _, _, inputs, features = size
    theirs = {"num_layers" if key == "layers" else key: value for key, value in options.items()}
    module = getattr(torch.nn, kind)(inputs, features, batch_first=True, **theirs).double()
    return KINDS[kind](features, **options, **ours, name="rnn"), module


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = to_host(ours), theirs.detach().numpy()
    scale = max(float(np.abs(theirs).max(initial=0)), 1e-30)
    assert float(np.abs(ours - theirs).max(initial=0)) <= 1e-10 * scale, what


def compare(model: Model, module: Any, xs: tuple[Any, ...], call: Any) -> None:
    """Compare the outputs of `call`, of the module and tensors, and all gradients."""
    load_state_dict(model, {f"rnn.{name}": value for name, value in module.state_dict().items()})
    rng, tensors = np.random.default_rng(1), [torch.from_numpy(x.copy()) for x in xs]
    outputs = call(module, *(tensor.requires_grad_() for tensor in tensors))
    outputs = outputs if isinstance(outputs, list) else [outputs]
    dys = [rng.normal(size=tuple(output.shape)) for output in outputs]
    torch.autograd.backward(outputs, [*map(torch.from_numpy, dys)])
    given, back = ([*map(model.backend.asarray, arrays)] for arrays in (xs, dys))
    y, saved = model.forward(tuple(given) if len(given) > 1 else given[0], StepContext(True))
    dx = model.backward(tuple(back) if len(back) > 1 else back[0], saved)
    for i, output in enumerate(outputs):
        assert_close(y[i] if len(outputs) > 1 else y, output, f"output {i}")
    for i, tensor in enumerate(tensors):
        if tensor.grad is not None:  # not of lengths
            assert_close(dx[i] if len(given) > 1 else dx, tensor.grad, f"dx {i}")
    names = {slot.name: slot.their_name for slot in slots_of(model)}
    assert {*names.values()} == {*state_dict(model)}
    gradients = {f"rnn.{name}": p.grad for name, p in module.named_parameters()}
    assert {*names.values()} == {*gradients}
    for name, p in model.parameters.items():
        assert_close(p.grad, gradients[names[name]], name)


@each("options", OPTIONS)
@each("size", SIZES)
@each("kind", KINDS)
def test_all_steps_equal_pytorch(kind, size, options, backend):
    net, module = twins(kind, size, OPTIONS[options])
    settings: dict[str, Any] = {"dtype": "float64", "input_gradient": True, "backend": backend}
    model = Model(net, size[1:3], **settings)
    x = np.random.default_rng(0).normal(size=size[:3])
    compare(model, module, (x,), lambda module, tensor: module(tensor)[0])


class Classifier(torch.nn.Module):
    """Two recurrent layers in two directions, and a layer that reads their last step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(torch.nn, kind)(3, 4, 2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


@each("any_batch", [True, False])
@each("kind", KINDS)
def test_an_onnx_file_of_pytorch_is_imported(kind, any_batch, tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    module, x = Classifier(kind).eval(), torch.randn(2 if any_batch else 1, 5, 3)
    options: dict[str, Any] = {"input_names": ["x"], "dynamo": False}
    if any_batch:
        options["dynamic_axes"] = {"x": {0: "N"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself and about sizes of batches
        torch.onnx.export(module, (x,), str(tmp_path / "net.onnx"), **options)
    model = import_onnx(tmp_path / "net.onnx")
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds.count(f"{kind}Layer") == 4
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(model.predict(x.numpy()), expected, rtol=1e-5, atol=1e-6)


def last_states(result: Any) -> Any:
    """The last states of both directions of the last layer, next to each other."""
    states = result[1][0] if isinstance(result[1], tuple) else result[1]
    return torch.cat([*states[-2:]], -1)


@each("with_states", [True, False])
@each("packed", [False, True])
@each("layers", [1, 2])
@each("return_sequences", [True, False])
@each("kind", KINDS)
def test_packed_sequences_and_states_equal_pytorch(
    kind, return_sequences, layers, packed, with_states, backend
):
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    size, options = (4, 6, 3, 5), {"layers": layers, "bidirectional": True}
    ours = {"return_sequences": return_sequences, "return_states": with_states}
    net, module = twins(kind, size, options, **ours)
    carried, lengths = net.kind.carried, torch.tensor([6, 1, 3, 5])

    def call(module: Any, x: Any, *states: Any) -> Any:
        if packed:
            x, states = pack_padded_sequence(x, lengths, True, enforce_sorted=False), states[1:]
        first = tuple(torch.stack(states[i::carried]) for i in range(carried) if states)
        y, last = module(x, (first if carried == 2 else first[0]) if states else None)
        y = pad_packed_sequence(y, batch_first=True)[0] if packed else y
        y = y if return_sequences else last_states((y, last))
        last = last if carried == 2 else (last,)
        ends = [state[i] for i in range(2 * layers) for state in last]
        return [y, *ends] if with_states else y

    shapes = [(6, 3), *[(1,)] * packed, *[(5,)] * (2 * layers * carried * with_states)]
    settings: dict[str, Any] = {"dtype": "float64", "input_gradient": True, "backend": backend}
    rng = np.random.default_rng(0)
    x, *states = [rng.normal(size=(4, *shape)) for shape in shapes if shape != (1,)]
    xs = (x, *[lengths[:, None].double().numpy()] * packed, *states)
    compare(Model(net, shapes, **settings), module, xs, call)

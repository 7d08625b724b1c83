"""Every optimizer that PyTorch has makes the same five steps in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Linear, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import get_optimizer
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

CASES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "sgd": ("sgd", {}, torch.optim.SGD, {}),
    "momentum": ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (
        "sgd",
        {"momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "rmsprop": ("rmsprop", {"rho": 0.95}, torch.optim.RMSprop, {"alpha": 0.95}),
    "adagrad": ("adagrad", {}, torch.optim.Adagrad, {}),
    "adagrad from 0.1": (
        "adagrad",
        {"initial": 0.1},
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.1},
    ),
    "adam": ("adam", {}, torch.optim.Adam, {}),
    "adamw": ("adamw", {}, torch.optim.AdamW, {}),
    "nadam": ("nadam", {}, torch.optim.NAdam, {}),
}


@each("case", CASES)
@each("decay", [0.0, 0.03])
def test_five_steps_equal_pytorch(case: str, decay: float, backend: Backend) -> None:
    name, own, peer, options = CASES[case]
    rng = np.random.default_rng(0)
    net = Sequential(Linear(5, bias=False), Linear(3, bias=False))
    model = Model(net, (7,), backend=backend, dtype="float64")
    weights = [p.value for p in model.parameters.values()]
    theirs = [torch.nn.Parameter(torch.from_numpy(to_host(w))) for w in weights]
    ours = get_optimizer(name, lr=0.01, weight_decay=decay, **own)
    ours.bind(model.backend, model.buffers)
    reference = peer(theirs, lr=0.01, weight_decay=decay, **options)
    for _ in range(5):
        for p, other in zip(model.parameters.values(), theirs, strict=True):
            gradient = rng.normal(size=p.shape)
            p.grad[...] = backend.asarray(gradient)
            other.grad = torch.from_numpy(gradient)
        ours.step()
        reference.step()
    for w, other in zip(weights, theirs, strict=True):
        np.testing.assert_allclose(to_host(w), other.detach().numpy(), rtol=1e-8, atol=1e-12)

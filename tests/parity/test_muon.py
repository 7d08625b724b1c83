"""Muon does what `torch.optim.Muon` does."""

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers.initializers import LeCun
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.optimizers import Muon
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

SHAPES = {"wide": (5, 9), "tall": (12, 4), "square": (6, 6)}


def in_float64(gradient, coefficients, steps, epsilon):
    """The iteration of PyTorch, which it computes in bfloat16 whatever the parameters are."""
    x = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / x.norm().clamp(min=epsilon)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


@each("nesterov", [True, False])
@each("bfloat16", [False, True])
def test_two_hundred_steps_are_those_of_pytorch(monkeypatch, nesterov, bfloat16):
    if not bfloat16:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float64)
    backend = create_backend("cpu")
    parameters = [Parameter(name, shape, LeCun("normal")) for name, shape in SHAPES.items()]
    buffer = ParameterBuffer([(p, 0) for p in parameters], backend=backend, dtype="float64")
    tensors = []
    for p in parameters:
        p.master[...] = p.initial_value(0)
        tensors.append(torch.nn.Parameter(torch.from_numpy(p.master.copy())))
    ours = Muon(0.02, nesterov=nesterov, bfloat16=bfloat16)
    ours.bind(backend, [buffer])
    theirs = torch.optim.Muon(
        tensors, 0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
    )
    rng = np.random.default_rng(0)
    for _ in range(200):
        for p, tensor in zip(parameters, tensors, strict=True):
            p.grad[...] = rng.normal(size=p.shape)
            tensor.grad = torch.from_numpy(p.grad.copy())
        ours.step()
        theirs.step()
    for p, tensor in zip(parameters, tensors, strict=True):
        # in 16 bits, orders of rounding differ: 200 steps of 0.02 * 0.2 * 12**0.5 in all
        error = abs(p.master - tensor.detach().numpy()).max()
        assert error < (0.1 if bfloat16 else 1e-12), error

"""Muon does what `torch.optim.Muon` does."""

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers.initializers import LeCun
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.optimizers import Muon
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")


def in_float64(gradient, coefficients, steps, epsilon):
    """The iteration of PyTorch, which it computes in bfloat16 whatever the parameters are."""
    (a, b, c), x = coefficients, gradient / gradient.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@each("nesterov", [True, False])
def test_two_hundred_steps_are_those_of_pytorch(monkeypatch, nesterov):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float64)
    backend, rng = create_backend("cpu"), np.random.default_rng(0)
    parameters = [Parameter(str(s), s, LeCun("normal")) for s in [(5, 9), (12, 4), (6, 6)]]
    buffer = ParameterBuffer([(p, 0) for p in parameters], backend=backend, dtype="float64")
    buffer.values[:] = rng.normal(size=buffer.size)
    tensors = [torch.nn.Parameter(torch.from_numpy(p.master.copy())) for p in parameters]
    ours, options = Muon(0.02, nesterov=nesterov), {"adjust_lr_fn": "match_rms_adamw"}
    ours.bind(backend, [buffer])
    theirs = torch.optim.Muon(tensors, 0.02, nesterov=nesterov, weight_decay=0.1, **options)
    for _ in range(200):
        buffer.grads[:] = rng.normal(size=buffer.size)
        for p, tensor in zip(parameters, tensors, strict=True):
            tensor.grad = torch.from_numpy(p.grad.copy())
        ours.step()
        theirs.step()
    for p, tensor in zip(parameters, tensors, strict=True):
        np.testing.assert_allclose(p.master, tensor.detach().numpy(), rtol=1e-12, atol=1e-12)

"""A GPT equals one of PyTorch's modules, with the embedding's matrix for the logits."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import StepContext
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import gpt
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

from tests.parity.test_attention import Block, assert_equal, randomize, their_name  # noqa: E402

nn = torch.nn
TOKENS, LENGTH, WIDTH, DEPTH, HEADS = 13, 7, 12, 2, 3


class Gpt(nn.Module):
    """The network of Radford et al. (2019), with the names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            Block(WIDTH, HEADS, epsilon=1e-5, causal=True, approximate="tanh") for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def test_loss_and_gradients_of_a_gpt_equal_those_of_pytorch(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    net = gpt(TOKENS, (LENGTH,), depth=DEPTH, heads=HEADS, width=WIDTH)
    model = Model(net, (LENGTH,), backend=backend, dtype="float64")
    randomize(model, rng)
    twin = Gpt()
    theirs = dict(twin.named_parameters())
    assert {their_name(name) for name in model.parameters} == set(theirs)
    with torch.no_grad():
        for name, p in model.parameters.items():
            theirs[their_name(name)].copy_(torch.from_numpy(to_host(p.master)))
    tokens, target = rng.integers(TOKENS, size=(2, 4, LENGTH))
    logits = twin(torch.from_numpy(tokens))
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(target).flatten())
    expected.backward()
    context = StepContext(training=True, samples=np.arange(4))
    y, saved = model.forward(backend.asarray(tokens, "float64"), context)
    loss, dy = CategoricalCrossEntropy()(backend, y, backend.asarray(target), 1 / 4)
    model.backward(dy, saved)
    assert_equal(y, logits, "logits")
    assert float(loss) / 4 == pytest.approx(expected.item(), rel=1e-9)
    for name, p in model.parameters.items():
        assert_equal(p.grad, theirs[their_name(name)].grad, name)

"""A GPT equals one of PyTorch's modules, with the embedding's matrix for the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import StepContext
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import gpt
from pydtnn.tools.interchange import StateDictReport, load_state_dict
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

nn = torch.nn
TOKENS, LENGTH, WIDTH, DEPTH, HEADS = 13, 7, 12, 2, 3


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Compare to 1e-9 of the largest entry: both sides sum in their own order, in float64."""
    theirs = theirs.detach().numpy()
    error = np.abs(to_host(ours) - theirs).max() / np.abs(theirs).max()
    assert error <= 1e-9, f"{what}: {error}"


def load_and_compare(model: Model, twin: Any) -> StateDictReport:
    """Compare loss and gradients for random weights of a module and random tokens."""
    rng, backend = np.random.default_rng(0), model.backend
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.from_numpy(0.3 * rng.normal(size=tuple(parameter.shape))))
    report = load_state_dict(model, twin.state_dict())
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
    theirs = dict(twin.named_parameters())
    for name, p in model.parameters.items():
        assert_equal(p.grad, theirs[report.pairs[name]].grad, name)
    return report


class Block(nn.Module):
    """A block of a causal transformer: normalisation comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = x + self.attention(z, z, z, need_weights=False, attn_mask=mask, is_causal=True)[0]
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """The network of Radford et al. (2019), with the names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def test_loss_and_gradients_of_a_gpt_equal_those_of_pytorch(backend):
    net = gpt(TOKENS, (LENGTH,), depth=DEPTH, heads=HEADS, width=WIDTH)
    load_and_compare(Model(net, (LENGTH,), backend=backend, dtype="float64"), Gpt())

"""A GPT equals one of PyTorch's modules, with the embedding's matrix for the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import StepContext
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import gpt
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

nn = torch.nn
TOKENS, LENGTH, WIDTH, DEPTH, HEADS = 13, 7, 12, 2, 3
NAMES = {"in_proj.w": "in_proj_weight", "in_proj.b": "in_proj_bias"}
NAMES |= {"out_proj.w": "out_proj.weight", "out_proj.b": "out_proj.bias"}
"""Parameters of `MultiHeadAttention`, by their names in `torch.nn.MultiheadAttention`."""


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Compare to 1e-9 of the largest entry: both sides sum in their own order, in float64."""
    theirs = theirs.detach().numpy()
    error = np.abs(to_host(ours) - theirs).max() / np.abs(theirs).max()
    assert error <= 1e-9, f"{what}: {error}"


def assert_loss_and_gradients_are_equal(
    model: Model, twin: Any, names: Mapping[str, str], rng: np.random.Generator
) -> None:
    """Compare for random tokens; `names` of parameters are those of the module, by ours."""
    backend = model.backend
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
        assert_equal(p.grad, theirs[names[name]].grad, name)


def randomize(model: Model, rng: np.random.Generator) -> None:
    for p in model.parameters.values():
        p.master += model.backend.asarray(0.1 * rng.normal(size=p.shape))
    model.refresh()


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


def their_name(name: str) -> str:
    """Name of a parameter in `Gpt`."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    name = name.removeprefix("embedding.").removeprefix("head.").replace("block", "blocks.")
    name = "position" if name == "position.w" else name
    ends = {".w": ".weight", ".gamma": ".weight", ".b": ".bias", ".beta": ".bias"}
    for ours, theirs in ends.items():
        name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
    return name


class Gpt(nn.Module):
    """The network of Radford et al. (2019), with the names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def test_loss_and_gradients_of_a_gpt_equal_those_of_pytorch(backend):
    rng = np.random.default_rng(0)
    net = gpt(TOKENS, (LENGTH,), depth=DEPTH, heads=HEADS, width=WIDTH)
    model = Model(net, (LENGTH,), backend=backend, dtype="float64")
    randomize(model, rng)
    twin = Gpt()
    theirs = dict(twin.named_parameters())
    names = {name: their_name(name) for name in model.parameters}
    assert {*names.values()} == {*theirs}
    with torch.no_grad():
        for name, p in model.parameters.items():
            theirs[names[name]].copy_(torch.from_numpy(to_host(p.master)))
    assert_loss_and_gradients_are_equal(model, twin, names, rng)

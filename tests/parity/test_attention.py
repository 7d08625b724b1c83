"""Multi-head attention equals PyTorch's module, and a vision transformer one of its modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.models import vit
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

nn = torch.nn
NAMES = {"in_proj.w": "in_proj_weight", "in_proj.b": "in_proj_bias"}
NAMES |= {"out_proj.w": "out_proj.weight", "out_proj.b": "out_proj.bias"}
"""Parameters of `MultiHeadAttention`, by their names in `torch.nn.MultiheadAttention`."""


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Compare to 1e-9 of the largest entry: both sides sum in their own order, in float64."""
    theirs = theirs.detach().numpy()
    error = np.abs(to_host(ours) - theirs).max() / np.abs(theirs).max()
    assert error <= 1e-9, f"{what}: {error}"


def randomize(model: Model, rng: np.random.Generator) -> None:
    for p in model.parameters.values():
        p.master += model.backend.asarray(0.1 * rng.normal(size=p.shape))
    model.refresh()


class Block(nn.Module):
    """A block of a transformer: normalisation comes first."""

    def __init__(
        self,
        width: int,
        heads: int,
        epsilon: float = 1e-6,
        causal: bool = False,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        self.causal, self.gelu = causal, nn.GELU(approximate)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=epsilon) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm1(x)
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        options = {"need_weights": False, "attn_mask": mask, "is_causal": self.causal}
        x = x + self.attention(z, z, z, **options)[0]
        return x + self.fc2(self.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """The network of Dosovitskiy et al. (2021), with the names of ours."""

    def __init__(
        self, width: int, depth: int, heads: int, classes: int, shape: tuple[int, ...], patch: int
    ) -> None:
        super().__init__()
        positions = shape[0] // patch * (shape[1] // patch)
        self.conv = nn.Conv2d(shape[2], width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(torch.zeros(positions + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.fc = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.conv(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), 1, -1), patches], 1)
        x = tokens + self.position
        for block in self.blocks:
            x = block(x)
        return self.fc(self.norm(x)[:, 0])


def their_name(name: str) -> str:
    """Name of a parameter in `VisionTransformer`."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    name = name.removeprefix("embedding.").removeprefix("head.").replace("block", "blocks.")
    name = {"class.token": "token", "position.w": "position"}.get(name, name)
    ends = {".w": ".weight", ".gamma": ".weight", ".b": ".bias", ".beta": ".bias"}
    for ours, theirs in ends.items():
        name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
    return name


@each("shape", [(16, 24, 3), (4, 4, 1)])
def test_a_vision_transformer_equals_one_of_pytorch(
    shape: tuple[int, int, int], backend: Backend
) -> None:
    rng = np.random.default_rng(0)
    net = vit(24, 3, 4, 5, shape, patch=4)
    model = Model(net, shape, backend=backend, dtype="float64", input_gradient=True)
    randomize(model, rng)
    twin = VisionTransformer(24, 3, 4, 5, shape, 4)
    theirs = dict(twin.named_parameters())
    assert {their_name(name) for name in model.parameters} == set(theirs)
    with torch.no_grad():
        for name, p in model.parameters.items():
            w = torch.from_numpy(to_host(p.master))
            theirs[their_name(name)].copy_(w.permute(0, 3, 1, 2) if w.ndim == 4 else w)
    x = rng.normal(size=(3, *shape))
    inputs = torch.from_numpy(x).requires_grad_()
    logits = twin(inputs)
    dy = rng.normal(size=(3, 5))
    logits.backward(torch.from_numpy(dy))
    context = StepContext(training=True, samples=np.arange(3))
    y, saved = model.forward(backend.asarray(x), context)
    dx = model.backward(backend.asarray(dy), saved)
    assert_equal(y, logits, "logits")
    assert_equal(dx, inputs.grad, "dx")
    for name, p in model.parameters.items():
        gradient = theirs[their_name(name)].grad
        gradient = gradient.permute(0, 2, 3, 1) if gradient.ndim == 4 else gradient
        assert_equal(p.grad, gradient, name)

"""A Llama equals a module of PyTorch with the names of Hugging Face's weights."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.model import Model
from pydtnn.models import llama
from pydtnn.tools.interchange import state_dict

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

from tests.parity.test_gpt import load_and_compare  # noqa: E402

nn = torch.nn
TOKENS, LENGTH, WIDTH, DEPTH, HEADS, GROUPS, HIDDEN, BASE = 13, 7, 24, 2, 6, 3, 20, 100.0
E = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, GROUPS * E, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, E)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q), turned(k)
        k, v = (array.repeat_interleave(HEADS // GROUPS, dim=1) for array in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotate pairs, the halves of (N, H, T, E), as complex numbers."""
    angles = torch.outer(torch.arange(LENGTH), BASE ** (-torch.arange(0, E, 2) / E))
    first, second = x.chunk(2, -1)
    y = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([y.real, y.imag], -1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The network of Touvron et al. (2023), with grouped queries (Ainslie et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.model.norm = Norm()
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(x)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_of_a_llama_equal_those_of_pytorch(tied, backend):
    sizes = {"depth": DEPTH, "heads": HEADS, "groups": GROUPS, "width": WIDTH, "hidden": HIDDEN}
    net = llama(TOKENS, (LENGTH,), **sizes, base=BASE, tied=tied)
    model = Model(net, (LENGTH,), backend=backend, dtype="float64")
    twin = Llama()
    if tied:
        twin.lm_head.weight = twin.model.embed_tokens.weight
    assert load_and_compare(model, twin).by == "names"
    written = state_dict(model, like=twin.state_dict())
    assert list(written) == list(twin.state_dict())
    for name, tensor in twin.state_dict().items():
        np.testing.assert_array_equal(written[name], tensor.numpy())

"""Weights of Hugging Face's GPT-2 give the same logits here, and ours give them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.model import Model
from pydtnn.models import gpt
from pydtnn.tools.interchange import load_state_dict, state_dict
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

TOKENS, LENGTH = 37, 12


def theirs() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_layer": 3, "n_head": 4, "n_embd": 32}
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def logits(module: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.filterwarnings("ignore")  # of transformers
@each("suffix", [".safetensors", ".bin"])
def test_logits_of_gpt_2_are_equal_after_loading_there_and_here(suffix, tmp_path):
    module = theirs()
    ours = Model(gpt(TOKENS, (LENGTH,), depth=3, heads=4, width=32), (LENGTH,), dtype="float64")
    if suffix == ".bin":
        path = tmp_path / "pytorch_model.bin"
        torch.save(module.state_dict(), path)
    else:
        module.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
    tokens = np.random.default_rng(0).integers(TOKENS, size=(2, LENGTH))
    assert load_state_dict(ours, path).by == "names"
    expected = logits(module, tokens)
    np.testing.assert_allclose(ours.predict(tokens), expected, atol=1e-9 * np.abs(expected).max())

    rng = np.random.default_rng(1)
    ours.load({name: a + 0.1 * rng.normal(size=a.shape) for name, a in ours.state().items()})
    arrays = state_dict(ours, like=module.state_dict())
    module.load_state_dict({k: torch.from_numpy(a) for k, a in arrays.items()}, strict=True)
    assert np.abs(logits(module, tokens) - expected).max() > 1e-3 * np.abs(expected).max()
    expected = logits(module, tokens)
    np.testing.assert_allclose(ours.predict(tokens), expected, atol=1e-9 * np.abs(expected).max())

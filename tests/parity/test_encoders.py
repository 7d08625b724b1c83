"""Weights of Hugging Face's BERT and T5 give the same logits here, and ours give them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.model import Model
from pydtnn.models import bert, t5
from pydtnn.tools.interchange import load_state_dict, state_dict
from tests.each import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

TOKENS, LENGTH, TARGET = 37, 12, 9
LENGTHS = np.array([[12], [7]])

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


def hugging_face(kind: str, **options: Any) -> Any:
    """A network of transformers with random weights, in float64."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    try:
        config = {"Bert": transformers.BertConfig, "T5Fo": transformers.T5Config}[kind[:4]]
        module = getattr(transformers, kind)(config(**options)).double().eval()
    except ModuleNotFoundError:
        pytest.skip("transformers requires another torchvision")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def compare(
    ours: Model, module: Any, inputs: tuple[Any, ...], given: dict[str, Any], tolerance: float
) -> None:
    """Load weights here, compare logits; change them here and load them there; compare again."""

    def close() -> None:
        tensors = {name: torch.from_numpy(array) for name, array in given.items()}
        with torch.no_grad():
            expected = module(**tensors).logits.numpy()
        found = ours.predict(inputs)
        filled = found.shape[1:2] == ours.input_shapes[0]  # outputs behind a length differ
        seen = np.arange(LENGTH) < LENGTHS if filled else ...
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=atol)

    assert load_state_dict(ours, module.state_dict()).by == "names"
    close()
    rng, changed = np.random.default_rng(1), {}
    for name, array in ours.state().items():
        tables = "encoder" if name.startswith("encoder") else "decoder"
        key = tables if name.endswith("positions") else name
        changed[key] = changed.get(key, array + 0.1 * rng.normal(size=array.shape))
        changed[name] = changed[key]
    ours.load({name: changed[name] for name in ours.state()})
    arrays = state_dict(ours, like=module.state_dict())
    module.load_state_dict({k: torch.from_numpy(a) for k, a in arrays.items()}, strict=True)
    close()
    named = state_dict(ours, names="hugging_face")
    assert named
    assert all((arrays[name] == array).all() for name, array in named.items())


@each("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_logits_of_bert_are_equal_after_loading_there_and_here(kind, rng):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    more = {"intermediate_size": 128, "vocab_size": TOKENS, "num_labels": 3}
    module = hugging_face(kind, **sizes, **more, max_position_embeddings=LENGTH)
    shape = ((LENGTH,), (1,), (LENGTH,))
    options: dict[str, Any] = {"depth": 2, "heads": 4, "width": 32}
    masked = kind == "BertForMaskedLM"
    net = bert(TOKENS, shape, **options) if masked else bert(3, shape, tokens=TOKENS, **options)
    x, segments = rng.integers(TOKENS, size=(2, LENGTH)), rng.integers(2, size=(2, LENGTH))
    seen = (np.arange(LENGTH) < LENGTHS).astype("int64")
    given = {"input_ids": x, "token_type_ids": segments, "attention_mask": seen}
    compare(Model(net, shape, dtype="float64"), module, (x, LENGTHS, segments), given, 1e-9)


@each("gated", [False, True])
def test_logits_of_t5_are_equal_after_loading_there_and_here(gated, rng):
    sizes = {"num_layers": 2, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 48}
    more = {
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
    }
    table = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    module = hugging_face("T5ForConditionalGeneration", vocab_size=TOKENS, **sizes, **more, **table)
    if gated:  # as in version 1.1; transformers shares the matrix at first
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    shape = ((LENGTH,), (TARGET,), (1,))
    options: dict[str, Any] = {"depth": 2, "heads": 4, "width": 32, "hidden": 48, "gated": gated}
    net = t5(TOKENS, shape, **options, buckets=8, distance=10, tied=not gated)
    ours = Model(net, shape, dtype="float64")
    x, y = rng.integers(TOKENS, size=(2, LENGTH)), rng.integers(TOKENS, size=(2, TARGET))
    seen = (np.arange(LENGTH) < LENGTHS).astype("int64")
    given = {"input_ids": x, "decoder_input_ids": y, "attention_mask": seen}
    # transformers computes norms and softmax of T5 in float32
    compare(ours, module, (x, y, LENGTHS), given, 1e-5)
    state = ours.state()
    name = "encoder.block1.attention.attention.positions"
    ours.load({**state, name: state[name] + 1})
    with pytest.raises(
        ValueError, match="must be equal to the other arrays that are encoder.block.0"
    ):
        state_dict(ours, names="hugging_face")

"""ONNX files of transformers, volumes and other layers, exported and imported again."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import save_model
from pydtnn.tools.interchange import export_onnx, import_onnx, load_state_dict, state_dict
from pydtnn.tools.interchange.__main__ import main
from tests.each import each
from tests.tools.interchange.runtime import assert_close, compute, randomized, samples

NO_ONNX = "onnx is not installed; pip install onnx"

SHARED = layers.Embedding(11, 6, tied=True, name="token")
IMAGES = {
    "activations": layers.Sequential(
        *(
            layers.ELU(),
            layers.GELU(),
            layers.LeakyReLU(),
            layers.SiLU(),
            layers.Softplus(),
            layers.Sigmoid(),
            layers.Tanh(),
            layers.ArcTan(),
        ),
        *(layers.ReLU6(), layers.Identity()),
        layers.GELU("none"),
    ),
    "softmax": layers.Softmax(),
    "log softmax": layers.LogSoftmax(),
    "convolutions": layers.Sequential(
        layers.Conv2d(6, (3, 2), padding=((1, 0), (0, 1)), stride=(1, 2), groups=3, bias=False),
        layers.Conv2d(4, 3, dilation=2, padding="same"),
    ),
    "pools": layers.Branches(
        layers.Sequential(layers.AvgPool2d(3, stride=2, padding=1), layers.MaxPool2d(2, padding=1)),
        layers.Sequential(
            layers.AvgPool2d(3, stride=2, padding=1, count_padding=False),
            layers.MaxPool2d(2, padding=((1, 1), (1, 1))),
        ),
        layers.Sequential(
            layers.AvgPool2d(4, stride=2, padding="same"), layers.MaxPool2d(2, padding=1)
        ),
        merge=layers.Concat(),
    ),
    "cuts": layers.Sequential(
        layers.Slice(slice(1, None, 2), slice(-5, -1)),
        layers.Pad(((1, 0), (0, 2), (1, 1))),
        layers.Conv2d(2, 1),
    ),
    "sides": layers.Branches(layers.Conv2d(3, 1), layers.Conv2d(3, 1), merge=layers.Concat(axis=0)),
    "features": layers.Sequential(
        layers.Flatten(),
        layers.BatchNorm(),
        layers.Dropout(0.3),
        layers.Linear(6),
        layers.Residual(layers.Linear(6)),
        layers.Softmax(),
        layers.Linear(2),
    ),
    "decoder": layers.Sequential(
        layers.Flatten(), layers.Linear(5 * 6 * 4), layers.Reshape((5, 6, 4)), layers.Conv2d(3, 2)
    ),
}
"""Networks of images (7, 9, 3)."""

NETWORKS = {
    **{name: (net, (7, 9, 3)) for name, net in IMAGES.items()},
    "norms of sequences": (layers.Sequential(layers.BatchNorm(), layers.GroupNorm(2)), (6, 6)),
    "last axes": (
        layers.Sequential(layers.Linear(4), layers.LayerNorm(), layers.LayerNorm(axes=2)),
        (6, 5, 3),
    ),
    "excitation": (
        layers.Branches(
            layers.HardSwish(),
            layers.Sequential(
                layers.GlobalAvgPool2d(),
                layers.Linear(3),
                layers.HardSigmoid(),
                layers.Reshape((1, 1, 3)),
            ),
            merge=layers.Multiply(),
        ),
        (6, 5, 3),
    ),
    "transposed": (
        layers.Sequential(
            layers.Transpose((2, 0, 1)), layers.Conv2d(4, 3), layers.Flatten(), layers.Linear(3)
        ),
        (6, 5, 3),
    ),
    "vit": (create_net("vit_tiny", 5, (8, 12, 3), dropout=0.1), (8, 12, 3)),
    "gpt": (create_net("gpt_nano", 13, (9,)), (9,)),
    "cosmoflow": (create_net("cosmoflow", 3, (9, 8, 8, 2), stages=3, filters=4), (9, 8, 8, 2)),
    "tied": (layers.Sequential(SHARED, layers.MultiHeadAttention(2, causal=True), SHARED), (7,)),
    "positions": (
        layers.Sequential(
            layers.PositionalEmbedding(),
            layers.LayerNorm(),
            layers.ClassToken(initializer="embedding"),
            layers.MultiHeadAttention(3, bias=False),
            layers.Linear(4, bias=False),
            layers.Slice(slice(1, -1)),
            layers.Reshape((5, 2, 2)),
        ),
        (6, 9),
    ),
    "signals": (
        layers.Sequential(
            layers.Conv1d(6, 3, dilation=2, padding=((4, 0),), groups=3),
            layers.BatchNorm(),
            layers.ReLU(),
            layers.MaxPool1d(3, stride=2, padding=1),
            layers.Conv1d(4, 2, bias=False),
            layers.AvgPool1d(2, stride=1, padding=((1, 0),), count_padding=False),
            layers.Branches(
                layers.GlobalAvgPool1d(),
                layers.Sequential(layers.Dropout(), layers.Flatten(), layers.Linear(4)),
                merge=layers.Concat(),
            ),
        ),
        (11, 3),
    ),
    "recurrent": (
        layers.Sequential(
            layers.LSTM(5, layers=2, bidirectional=True, dropout=0.1),
            layers.Linear(4),
            layers.GRU(3, bias=False),
            layers.GRU(4, bidirectional=True, return_sequences=False),
            layers.Linear(2),
        ),
        (6, 3),
    ),
    "volumes": (
        layers.Sequential(
            layers.Conv3d(
                6, (1, 2, 3), stride=(1, 2, 1), padding=((0, 0), (1, 0), (1, 1)), groups=3
            ),
            layers.MaxPool3d(2, stride=1),
            layers.GroupNorm(2),
            layers.AvgPool3d((1, 2, 1), padding=((0, 0), (1, 0), (0, 0)), count_padding=False),
            layers.Branches(
                layers.GlobalAvgPool3d(),
                layers.Sequential(
                    layers.Conv3d(2, 2, dilation=(1, 1, 2)), layers.Flatten(), layers.Linear(3)
                ),
                merge=layers.Concat(),
            ),
        ),
        (4, 7, 6, 3),
    ),
    "images": (
        layers.Sequential(
            layers.ConvTranspose2d(
                6, (3, 2), stride=(2, 1), padding=1, output_padding=(1, 0), dilation=2, groups=3
            ),
            layers.LocalResponseNorm(3, alpha=0.5, k=2.0),
            layers.Upsample(2),
            layers.Upsample((3, 2), "bilinear"),
            layers.GroupNorm(3),
            layers.LayerNorm(axes=3),
            layers.Conv2d(8, 3, stride=4),
            layers.Reshape((-1, 8)),
            layers.LayerNorm(),
        ),
        (4, 5, 3),
    ),
}


@each(
    "options",
    [
        {"window": 3, "scale": 0.4},
        {"window": 2, "causal": True, "positions": layers.LinearBiases()},
        {"positions": layers.RelativePositions(6, 5, initializer="glorot_uniform")},
    ],
)
def test_masks_and_biases_of_attention_are_written_and_read(options, tmp_path):
    pytest.importorskip("onnx", reason=NO_ONNX)
    model = randomized(Model(layers.MultiHeadAttention(3, **options), (7, 6)))
    export_onnx(model, tmp_path / "net.onnx")
    x = inputs(model, (7, 6))
    assert_close(model.predict(x), compute(tmp_path / "net.onnx", x))
    assert_close(model.predict(x), import_onnx(tmp_path / "net.onnx").predict(x))


@each("return_sequences", [True, False])
@each("lengths", [(), (5, 2, 3)])
@each("kind", [layers.LSTM, layers.GRU])
def test_states_of_recurrent_layers_are_written_and_read(kind, lengths, return_sequences, tmp_path):
    pytest.importorskip("onnx", reason=NO_ONNX)
    options = {"return_sequences": return_sequences, "return_states": True}
    shapes = [(5, 3), *[(1,)] * bool(lengths), *[(4,)] * (4 * kind.kind.carried)]
    model = Model(kind(4, layers=2, bidirectional=True, **options), shapes)
    xs = samples(model)
    if lengths:
        xs[1] = np.float32(lengths).reshape(3, 1)
    export_onnx(model, tmp_path / "net.onnx")
    expected = compute(tmp_path / "net.onnx", *xs)
    back = import_onnx(tmp_path / "net.onnx", verify=not lengths)
    for network in (model, back):
        for ours, theirs in zip(network.predict(tuple(xs)), expected, strict=True):
            assert_close(ours, theirs)


def test_a_file_says_that_it_does_not_round_as_the_model(tmp_path, capsys):
    model = Model(layers.Linear(3), (4,), dtype="bfloat16")
    save_model(model, tmp_path / "net.pydtnn")
    assert main(["export", str(tmp_path / "net.pydtnn"), str(tmp_path / "net.onnx")]) == 0
    assert "outputs differ by the rounding of the bfloat16 model" in capsys.readouterr().out
    onnx: Any = pytest.importorskip("onnx", reason=NO_ONNX)
    properties = onnx.load(tmp_path / "net.onnx").metadata_props
    assert {entry.key: entry.value for entry in properties}["trained_as"] == "bfloat16"


@each("name", NETWORKS)
def test_onnxruntime_computes_what_the_network_computes(name, tmp_path):
    pytest.importorskip("onnx", reason=NO_ONNX)
    net, shape = deepcopy(NETWORKS[name])
    model = randomized(Model(net, shape))
    export_onnx(model, tmp_path / "net.onnx")
    x = inputs(model, shape)
    assert_close(model.predict(x), compute(tmp_path / "net.onnx", x))
    back = import_onnx(tmp_path / "net.onnx", verify=True)
    assert_close(back.predict(x), model.predict(x))
    if name == "gpt":  # one projection has queries, keys and values
        assert layers.Slice not in {part.layer.kind for part in back.description.parts}


def inputs(model: Model, shape: tuple[int, ...]) -> np.ndarray:
    """Five samples; tokens for an embedding."""
    if len(shape) == 1:
        return np.random.default_rng(2).integers(11, size=(5, *shape)).astype("float32")
    return samples(model, 5)[0]


def test_tokens_are_integers_and_a_tied_matrix_is_stored_once(tmp_path):
    net, shape = deepcopy(NETWORKS["tied"])
    export_onnx(Model(net, shape), tmp_path / "net.onnx")
    onnx: Any = pytest.importorskip("onnx", reason=NO_ONNX)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [c.name for c in graph.initializer if list(c.dims) == [11, 6]] == ["token.weight"]


@each("name", ["signals", "recurrent", "volumes", "images", "positions"])
def test_layouts_are_those_of_pytorch_and_come_back(name):
    net, shape = deepcopy(NETWORKS[name])
    model = randomized(Model(net, shape))
    theirs = state_dict(model)
    other = Model(deepcopy(NETWORKS[name][0]), shape, seed=1)
    load_state_dict(other, theirs)
    for array, again in zip(model.state().values(), other.state().values(), strict=True):
        np.testing.assert_array_equal(array, again)

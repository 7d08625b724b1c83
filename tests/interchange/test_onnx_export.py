"""ONNX files of transformers, volumes and other layers, exported and imported again."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.interchange import export_onnx, import_onnx, load_state_dict, state_dict
from pydtnn.interchange.__main__ import main
from pydtnn.layers import (
    ELU,
    GELU,
    GRU,
    LSTM,
    AdaptiveAvgPool2d,
    ArcTan,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    BatchNorm,
    Branches,
    ClassToken,
    Concat,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool1d,
    GlobalAvgPool2d,
    GlobalAvgPool3d,
    GroupNorm,
    HardSigmoid,
    HardSwish,
    Identity,
    LayerNorm,
    LeakyReLU,
    Linear,
    LocalResponseNorm,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MultiHeadAttention,
    Multiply,
    Pad,
    PositionalEmbedding,
    ReLU,
    ReLU6,
    Reshape,
    Residual,
    Sequential,
    Sigmoid,
    SiLU,
    Slice,
    Softmax,
    Softplus,
    Tanh,
    Transpose,
    Upsample,
)
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import save_model
from tests.each import each
from tests.interchange.runtime import assert_close, compute, randomized, samples

NO_ONNX = "onnx is not installed; pip install onnx"

SHARED = Embedding(11, 6, tied=True, name="token")
IMAGES = {
    "activations": Sequential(
        *(ELU(), GELU(), LeakyReLU(), SiLU(), Softplus(), Sigmoid(), Tanh(), ArcTan()),
        *(ReLU6(), Identity()),
        GELU("none"),
    ),
    "softmax": Softmax(),
    "log softmax": LogSoftmax(),
    "convolutions": Sequential(
        Conv2d(6, (3, 2), padding=((1, 0), (0, 1)), stride=(1, 2), groups=3, bias=False),
        Conv2d(4, 3, dilation=2, padding="same"),
    ),
    "pools": Branches(
        Sequential(AvgPool2d(3, stride=2, padding=1), MaxPool2d(2, padding=1)),
        Sequential(
            AvgPool2d(3, stride=2, padding=1, count_padding=False),
            MaxPool2d(2, padding=((1, 1), (1, 1))),
        ),
        merge=Concat(),
    ),
    "uneven bins": Sequential(AdaptiveAvgPool2d((3, 4)), AdaptiveAvgPool2d((3, 2))),
    "cuts": Sequential(
        Slice(slice(1, None, 2), slice(-5, -1)), Pad(((1, 0), (0, 2), (1, 1))), Conv2d(2, 1)
    ),
    "sides": Branches(Conv2d(3, 1), Conv2d(3, 1), merge=Concat(axis=0)),
    "features": Sequential(
        Flatten(), BatchNorm(), Dropout(0.3), Linear(6), Residual(Linear(6)), Softmax(), Linear(2)
    ),
    "decoder": Sequential(Flatten(), Linear(5 * 6 * 4), Reshape((5, 6, 4)), Conv2d(3, 2)),
    "joined": Sequential(
        Branches(Sequential(Conv2d(2, 3), Flatten()), Flatten(), merge=Concat()), Linear(3)
    ),
}
"""Networks of images (7, 9, 3)."""

NETWORKS = {
    **{name: (net, (7, 9, 3)) for name, net in IMAGES.items()},
    "norms of sequences": (Sequential(BatchNorm(), GroupNorm(2)), (6, 6)),
    "features at the end": (Sequential(Conv2d(4, 3), Flatten(), ReLU()), (6, 5, 3)),
    "last axes": (Sequential(Linear(4), LayerNorm(), LayerNorm(axes=2)), (6, 5, 3)),
    "excitation": (
        Branches(
            HardSwish(),
            Sequential(GlobalAvgPool2d(), Linear(3), HardSigmoid(), Reshape((1, 1, 3))),
            merge=Multiply(),
        ),
        (6, 5, 3),
    ),
    "transposed": (Sequential(Transpose((2, 0, 1)), Conv2d(4, 3), Flatten(), Linear(3)), (6, 5, 3)),
    "vit": (create_net("vit_tiny", 5, (8, 12, 3), dropout=0.1), (8, 12, 3)),
    "gpt": (create_net("gpt_nano", 13, (9,)), (9,)),
    "cosmoflow": (create_net("cosmoflow", 3, (9, 8, 8, 2), stages=3, filters=4), (9, 8, 8, 2)),
    "tied": (Sequential(SHARED, MultiHeadAttention(2, causal=True), SHARED), (7,)),
    "positions": (
        Sequential(
            PositionalEmbedding(),
            LayerNorm(),
            ClassToken(initializer="embedding"),
            MultiHeadAttention(3, bias=False),
            Linear(4, bias=False),
            Slice(slice(1, -1)),
            Reshape((5, 2, 2)),
        ),
        (6, 9),
    ),
    "signals": (
        Sequential(
            Conv1d(6, 3, dilation=2, padding=((4, 0),), groups=3),
            BatchNorm(),
            ReLU(),
            MaxPool1d(3, stride=2, padding=1),
            Conv1d(4, 2, bias=False),
            AvgPool1d(2, stride=1, padding=((1, 0),), count_padding=False),
            Branches(
                GlobalAvgPool1d(), Sequential(Dropout(), Flatten(), Linear(4)), merge=Concat()
            ),
        ),
        (11, 3),
    ),
    "recurrent": (
        Sequential(
            LSTM(5, layers=2, bidirectional=True, dropout=0.1),
            Linear(4),
            GRU(3, bias=False),
            GRU(4, bidirectional=True, return_sequences=False),
            Linear(2),
        ),
        (6, 3),
    ),
    "volumes": (
        Sequential(
            Conv3d(6, (1, 2, 3), stride=(1, 2, 1), padding=((0, 0), (1, 0), (1, 1)), groups=3),
            MaxPool3d(2, stride=1),
            GroupNorm(2),
            AvgPool3d((1, 2, 1), padding=((0, 0), (1, 0), (0, 0)), count_padding=False),
            Branches(
                GlobalAvgPool3d(),
                Sequential(Conv3d(2, 2, dilation=(1, 1, 2)), Flatten(), Linear(3)),
                merge=Concat(),
            ),
        ),
        (4, 7, 6, 3),
    ),
    "images": (
        Sequential(
            ConvTranspose2d(
                6, (3, 2), stride=(2, 1), padding=1, output_padding=(1, 0), dilation=2, groups=3
            ),
            LocalResponseNorm(3, alpha=0.5, k=2.0),
            Upsample(2),
            Upsample((3, 2), "bilinear"),
            GroupNorm(3),
            LayerNorm(axes=3),
            Conv2d(8, 3, stride=4),
            Reshape((-1, 8)),
            LayerNorm(),
        ),
        (4, 5, 3),
    ),
}


def test_a_file_says_that_it_does_not_round_as_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(Linear(3), (4,), dtype="bfloat16")
    save_model(model, tmp_path / "net.pydtnn")
    assert main(["export", str(tmp_path / "net.pydtnn"), str(tmp_path / "net.onnx")]) == 0
    assert "outputs differ by the rounding of the bfloat16 model" in capsys.readouterr().out
    onnx: Any = pytest.importorskip("onnx", reason=NO_ONNX)
    properties = onnx.load(tmp_path / "net.onnx").metadata_props
    assert {entry.key: entry.value for entry in properties}["trained_as"] == "bfloat16"


@each("name", NETWORKS)
def test_onnxruntime_computes_what_the_network_computes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason=NO_ONNX)
    net, shape = deepcopy(NETWORKS[name])
    model = randomized(Model(net, shape))
    export_onnx(model, tmp_path / "net.onnx")
    x = inputs(model, shape)
    assert_close(model.predict(x), compute(tmp_path / "net.onnx", x))
    back = import_onnx(tmp_path / "net.onnx", verify=True)
    assert_close(back.predict(x), model.predict(x))
    if name == "gpt":  # one projection has queries, keys and values
        assert Slice not in {part.layer.kind for part in back.description.parts}


def inputs(model: Model, shape: tuple[int, ...]) -> np.ndarray:
    """Five samples; tokens for an embedding."""
    if len(shape) == 1:
        return np.random.default_rng(2).integers(11, size=(5, *shape)).astype("float32")
    return samples(model, 5)[0]


def test_tokens_are_integers_and_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    net, shape = deepcopy(NETWORKS["tied"])
    export_onnx(Model(net, shape), tmp_path / "net.onnx")
    onnx: Any = pytest.importorskip("onnx", reason=NO_ONNX)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert [c.name for c in graph.initializer if list(c.dims) == [11, 6]] == ["token.weight"]


@each("name", ["signals", "recurrent", "volumes", "images", "positions"])
def test_layouts_are_those_of_pytorch_and_come_back(name: str) -> None:
    net, shape = deepcopy(NETWORKS[name])
    model = randomized(Model(net, shape))
    theirs = state_dict(model)
    other = Model(deepcopy(NETWORKS[name][0]), shape, seed=1)
    load_state_dict(other, theirs)
    for array, again in zip(model.state().values(), other.state().values(), strict=True):
        np.testing.assert_array_equal(array, again)

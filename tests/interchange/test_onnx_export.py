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
    GRU,
    LSTM,
    AvgPool1d,
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
    LayerNorm,
    Linear,
    LocalResponseNorm,
    MaxPool1d,
    MaxPool3d,
    MultiHeadAttention,
    Multiply,
    PositionalEmbedding,
    ReLU,
    Reshape,
    Sequential,
    Slice,
    Transpose,
    Upsample,
)
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import save_model
from tests.each import each
from tests.interchange.runtime import assert_close, compute, randomized, samples

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")

SHARED = Embedding(11, 6, tied=True, name="token")
NETWORKS = {
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
    properties = onnx.load(tmp_path / "net.onnx").metadata_props
    assert {entry.key: entry.value for entry in properties}["trained_as"] == "bfloat16"


@each("name", NETWORKS)
def test_onnxruntime_computes_what_the_network_computes(name: str, tmp_path: Path) -> None:
    net, shape = deepcopy(NETWORKS[name])
    model = randomized(Model(net, shape))
    export_onnx(model, tmp_path / "net.onnx")
    x = inputs(model, shape)
    assert_close(model.predict(x), compute(tmp_path / "net.onnx", x))
    assert_close(import_onnx(tmp_path / "net.onnx").predict(x), model.predict(x))


def inputs(model: Model, shape: tuple[int, ...]) -> np.ndarray:
    """Five samples; tokens for an embedding."""
    if len(shape) == 1:
        return np.random.default_rng(2).integers(11, size=(5, *shape)).astype("float32")
    return samples(model, 5)[0]


def test_tokens_are_integers_and_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    net, shape = deepcopy(NETWORKS["tied"])
    export_onnx(Model(net, shape), tmp_path / "net.onnx")
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


def test_signals_are_flattened_in_the_order_of_pytorch(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    twin = torch.nn.Sequential(
        *(torch.nn.Conv1d(2, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool1d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(4 * 4, 5)),
    )
    net = Sequential(Conv1d(4, 3), ReLU(), MaxPool1d(2), Flatten(), Linear(5))
    model = Model(net, (10, 2))
    load_state_dict(model, twin.state_dict())
    x = rng.normal(size=(3, 10, 2)).astype("float32")
    with torch.no_grad():
        expected = twin(torch.from_numpy(np.moveaxis(x, -1, 1).copy())).numpy()
    assert_close(model.predict(x), expected)


def test_filters_of_volumes_have_the_layout_of_pytorch(rng: np.random.Generator) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    twin = torch.nn.Sequential(
        torch.nn.Conv3d(2, 4, (1, 2, 3)), torch.nn.Flatten(), torch.nn.Linear(4 * 3 * 2 * 2, 5)
    )
    model = Model(Sequential(Conv3d(4, (1, 2, 3)), Flatten(), Linear(5)), (3, 3, 4, 2))
    load_state_dict(model, twin.state_dict())
    x = rng.normal(size=(2, 3, 3, 4, 2)).astype("float32")
    with torch.no_grad():
        expected = twin(torch.from_numpy(np.moveaxis(x, -1, 1).copy())).numpy()
    assert_close(model.predict(x), expected)


def test_transposed_filters_have_the_layout_of_pytorch(rng: np.random.Generator) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    twin = torch.nn.ConvTranspose2d(4, 6, (3, 2), stride=2, groups=2)
    model = Model(ConvTranspose2d(6, (3, 2), stride=2, groups=2), (3, 4, 4))
    load_state_dict(model, {f"conv.{k}": v for k, v in twin.state_dict().items()})
    x = rng.normal(size=(2, 3, 4, 4)).astype("float32")
    with torch.no_grad():
        expected = twin(torch.from_numpy(np.moveaxis(x, -1, 1).copy())).numpy()
    assert_close(model.predict(x), np.moveaxis(expected, 1, -1))

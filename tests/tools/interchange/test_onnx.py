"""ONNX files: what onnxruntime computes, and what comes back."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data.inputs import Input, Inputs
from pydtnn.data.statistics import Statistics
from pydtnn.layers import (
    AdaptiveAvgPool2d,
    Flatten,
    LocalResponseNorm,
    Rescale,
)
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import load, save_model
from pydtnn.saving.weights import encode
from pydtnn.tools.interchange import export_onnx, import_onnx
from pydtnn.tools.interchange.__main__ import main
from tests.each import each
from tests.saving.networks import two
from tests.tools.interchange.runtime import assert_close, compute, randomized, samples

pytestmark = pytest.mark.skipif(not find_spec("onnx"), reason="onnx is not installed")


ZOO = [
    ("mlp", (5, 4, 3), {"hidden": (16, 8), "dropout": 0.1}),
    ("cnn", (8, 9, 3), {}),
    ("resnet20", (9, 8, 3), {"shortcut": "A"}),
]
LARGE = [
    ("alexnet", (29, 31, 3), {}),
    ("vgg11_bn", (32, 33, 1), {}),
    ("resnet18", (16, 17, 3), {}),
    ("resnext50", (8, 9, 3), {}),
    ("mobilenet_v2", (33, 32, 3), {}),
    ("googlenet", (64, 65, 3), {}),
]
"""Each family of models, in each of its forms."""


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [*ZOO, *(pytest.param(*case, marks=pytest.mark.long) for case in LARGE)],
)
def test_onnxruntime_and_the_imported_model_compute_the_same_logits(name, shape, options, tmp_path):
    model = randomized(Model(create_net(name, 5, shape, **options), shape))
    path = tmp_path / "net.onnx"
    export_onnx(model, path)
    (x,) = samples(model)
    expected = model.predict(x)
    assert_close(expected, compute(path, x))
    back = import_onnx(path)
    np.testing.assert_array_equal(back.predict(x), expected)
    assert encode(back.state()) == encode(model.state())


def test_several_inputs_and_outputs_and_a_shared_layer_are_exported(tmp_path):
    model, path = randomized(two()), tmp_path / "two.onnx"
    export_onnx(model, path)
    xs = samples(model)
    back = import_onnx(path)
    outputs = (compute(path, *xs), model.predict(tuple(xs)), back.predict(tuple(xs)))
    for theirs, ours, again in zip(*outputs, strict=True):
        assert_close(ours, theirs)
        assert_close(again, theirs)


def test_the_file_tells_opset_and_layout(tmp_path):
    export_onnx(Model(create_net("cnn", 5, (8, 9, 3)), (8, 9, 3)), tmp_path / "net.onnx")
    message = read(tmp_path / "net.onnx")
    assert [(entry.domain, entry.version) for entry in message.opset_import] == [("", 17)]
    assert {entry.key: entry.value for entry in message.metadata_props} == {
        "opset": "17",
        "layout": "NCHW",
        "trained_as": "float32",
    }
    (value,) = message.graph.input
    sizes = [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
    assert sizes == ["N", 3, 8, 9]


def test_a_float64_model_is_exported_and_imported_exactly(tmp_path):
    model = randomized(Model(create_net("resnet8", 5, (9, 8, 3)), (9, 8, 3), dtype="float64"))
    export_onnx(model, tmp_path / "net.onnx")
    back = import_onnx(tmp_path / "net.onnx", dtype="float64")
    assert encode(back.state()) == encode(model.state())


def read(path: Path) -> Any:
    import onnx

    return onnx.load(path)


class Twice(Rescale):
    """A layer of one's own."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(2.0, name=name)


@each(
    ("layer", "message"),
    [
        (
            LocalResponseNorm(2),
            "export_onnx: localresponsenorm: LocalResponseNorm must have an odd size to be expo",
        ),
        (
            AdaptiveAvgPool2d((2, 2)),
            "export_onnx: adaptiveavgpool2d: AdaptiveAvgPool2d must have bins (2, 2) of equal si",
        ),
        (Flatten(), "export_onnx: output flatten: the features have another order in ONNX"),
        (
            Twice(),
            "export_onnx: twice: Twice cannot be exported; expected one of AdaptiveAvgPool2",
        ),
    ],
)
def test_layers_that_cannot_be_exported_are_refused(layer, message, tmp_path):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        export_onnx(Model(layer, (2, 3, 4)), tmp_path / "net.onnx")
    assert not [*tmp_path.iterdir()]


def test_the_command_imports_and_exports(tmp_path, capsys):
    saved, path, other = tmp_path / "a.pydtnn", tmp_path / "net.onnx", tmp_path / "b.pydtnn"
    model = randomized(Model(create_net("resnet8", 5, (9, 8, 3)), (9, 8, 3)))
    save_model(model, saved)
    assert main(["export", str(saved), str(path)]) == 0
    assert main(["import", str(path), str(other)]) == 0
    assert encode(load(other).state()) == encode(model.state())
    assert main(["import", str(path), str(other), "--classes", "5"]) == 1
    message = "pydtnn interchange: import: an ONNX file contains the network; omit --model, --shape"
    assert capsys.readouterr().err.startswith(message)


def pixels(model: Model) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (5, *shape)).astype("uint8") for shape in model.input_shapes]


def known(model: Model, *, floats: bool = False) -> Model:
    """The model, as if trained on pixels or floats with other statistics for each channel."""
    parts = []
    for shape in model.input_shapes:
        channels = np.arange(shape[-1])
        statistics = Statistics(0.3 + 0.1 * channels, 0.2 + 0.05 * channels)
        parts.append(Input(shape, "float32" if floats else "uint8", statistics, None))
    model.inputs = Inputs(tuple(parts))
    return model


@each(
    ("name", "shape", "dtype"),
    [
        ("cnn", (8, 9, 3), "float32"),
        ("cnn", (8, 8, 1), "float32"),
        ("mlp", (7,), "float32"),
        ("mlp", (7,), "float64"),  # onnxruntime has no convolutions of float64
    ],
)
def test_a_graph_that_normalises_takes_raw_pixels(name, shape, dtype, tmp_path):
    model = known(randomized(Model(create_net(name, 5, shape), shape, dtype=dtype)))
    export_onnx(model, tmp_path / "a.onnx", normalize=True)
    raw = pixels(model)
    ours = model.predict(raw[0])
    assert_close(ours, compute(tmp_path / "a.onnx", raw[0].astype(dtype)))
    again = import_onnx(tmp_path / "a.onnx", dtype=dtype, verify=True)
    assert_close(ours, again.predict(raw[0].astype(dtype)))
    about = {p.key: p.value for p in read(tmp_path / "a.onnx").metadata_props}
    channels = np.arange(shape[-1])
    np.testing.assert_allclose(json.loads(about["mean"]), 255 * (0.3 + 0.1 * channels))
    np.testing.assert_allclose(json.loads(about["std"]), 255 * (0.2 + 0.05 * channels))
    assert about["normalization"] == "in the graph"
    export_onnx(model, tmp_path / "b.onnx")
    plain = {p.key: p.value for p in read(tmp_path / "b.onnx").metadata_props}
    assert plain == about | {"normalization": "(x - mean) / std before it"}
    mean, std = (np.array(json.loads(about[what])) for what in ("mean", "std"))
    given = ((raw[0] - mean) / std).astype(dtype)
    assert_close(ours, compute(tmp_path / "b.onnx", given))


def test_each_of_two_inputs_is_normalised_with_its_own_statistics(tmp_path):
    model = known(randomized(two()), floats=True)
    export_onnx(model, tmp_path / "a.onnx", normalize=True)
    raw = samples(model)
    given = [
        ((x - part.statistics.mean) / part.statistics.std).astype("float32")
        for x, part in zip(raw, model.inputs.parts, strict=True)
    ]
    ours = model.predict(tuple(given), check_range=False)
    for own, theirs in zip(ours, compute(tmp_path / "a.onnx", *raw), strict=True):
        assert_close(own, theirs)
    names = [name for name, _ in model.description.inputs]
    about = {p.key for p in read(tmp_path / "a.onnx").metadata_props}
    assert {f"{name}.{what}" for name in names for what in ("mean", "std")} <= about


def test_the_command_exports_a_graph_that_normalises_if_there_are_statistics(tmp_path, capsys):
    model = randomized(Model(create_net("mlp", 5, (7,)), (7,)))
    target = tmp_path / "a.onnx"
    with pytest.raises(ValueError, match="^export_onnx: normalize=True requires the mean and dev"):
        export_onnx(model, target, normalize=True)
    save_model(known(model), tmp_path / "a.pydtnn")
    assert main(["export", str(tmp_path / "a.pydtnn"), str(target), "--normalize"]) == 0
    raw = pixels(model)[0]
    assert_close(model.predict(raw), compute(target, raw.astype("float32")))
    assert main(["export", str(tmp_path / "a.pydtnn"), f"{target}.pt", "--normalize"]) == 1
    assert "--normalize is for ONNX, not for state dicts" in capsys.readouterr().err

"""Weights of Keras, in files with the structure that Keras 2 writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.interchange import load_keras_weights
from pydtnn.interchange.__main__ import main
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import load
from pydtnn.saving.weights import encode

h5py = pytest.importorskip("h5py", reason="h5py is not installed; pip install h5py")

CHANNELS, MULTIPLIER = 4, 2


def model(seed: int = 0) -> Model:
    net = Sequential(
        Conv2d(CHANNELS, (3, 2), bias=False),
        BatchNorm(),
        ReLU(),
        Conv2d(CHANNELS * MULTIPLIER, 2, groups=CHANNELS),
        Flatten(),
        Linear(5),
    )
    made = Model(net, (6, 5, 3), seed=seed)
    made.statistics.running[:] = np.random.default_rng(seed).uniform(0.5, 1, 1)
    return made


def kernels(made: Model) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of a model by the names, and in the layouts, of Keras."""
    conv, norm, depthwise, _, _ = ("conv2d0", "batchnorm1", "conv2d3", "flatten4", "linear5")
    state = made.state()
    taps = np.empty((2, 2, CHANNELS, MULTIPLIER), "float32")
    for c, m in np.ndindex(CHANNELS, MULTIPLIER):
        taps[:, :, c, m] = state[f"{depthwise}.w"][c * MULTIPLIER + m, :, :, 0]
    return {
        "input_1": {},
        "conv2d": {"kernel": np.einsum("ohwi->hwio", state[f"{conv}.w"])},
        "batch_normalization": {
            "gamma": state[f"{norm}.gamma"],
            "beta": state[f"{norm}.beta"],
            "moving_mean": state[f"{norm}.running_mean"],
            "moving_variance": state[f"{norm}.running_variance"],
        },
        "depthwise_conv2d": {"depthwise_kernel": taps, "bias": state[f"{depthwise}.b"]},
        "dense": {"kernel": state["linear5.w"].T, "bias": state["linear5.b"]},
    }


def write(path: Path, layers: dict[str, dict[str, np.ndarray]], group: str = "/") -> Path:
    with h5py.File(path, "w") as file:
        root: Any = file.require_group(group)
        root.attrs["layer_names"] = [name.encode() for name in layers]
        for layer, arrays in layers.items():
            own = root.create_group(layer)
            names = [what if "/" in what else f"{layer}/{what}:0" for what in arrays]
            own.attrs["weight_names"] = [name.encode() for name in names]
            for name, array in zip(names, arrays.values(), strict=True):
                own[name] = array
    return path


@pytest.mark.parametrize("group", ["/", "model_weights"], ids=["weights", "model"])
def test_weights_of_keras_are_read(group: str, tmp_path: Path) -> None:
    ours, other = model(0), model(1)
    report = load_keras_weights(ours, write(tmp_path / "net.h5", kernels(other), group))
    assert report.by == "order"
    assert encode(ours.state()) == encode(other.state())


def test_layers_are_matched_by_name_and_a_network_in_another_has_names_of_its_own(
    tmp_path: Path,
) -> None:
    ours, other = model(0), model(1)
    (names, layers), arrays = (["conv2d0", "batchnorm1", "conv2d3", "linear5"], {}), kernels(other)
    for name, own in zip(names, [*arrays.values()][1:], strict=True):
        layers |= {f"{name}/{what}:0": array for what, array in own.items()}
    report = load_keras_weights(ours, write(tmp_path / "net.h5", {"inner": layers}))
    assert report.by == "names"
    assert encode(ours.state()) == encode(other.state())


def test_the_command_imports_weights_of_keras(tmp_path: Path) -> None:
    other = Model(create_net("mlp", 3, (2, 2, 1), hidden=(4,)), (2, 2, 1), seed=1)
    state, path = other.state(), tmp_path / "net.h5"
    names = {"dense": "fc1", "dense_1": "fc2"}
    arrays = {k: {"kernel": state[f"{n}.w"].T, "bias": state[f"{n}.b"]} for k, n in names.items()}
    write(path, arrays)
    options = ["--model", "mlp", "--model-options", '{"hidden": [4]}', "--shape", "2,2,1"]
    folder = str(tmp_path / "net.pydtnn")
    assert main(["import", str(path), folder, *options, "--classes", "3"]) == 0
    assert encode(load(folder).state()) == encode(state)


def damaged(kind: str, path: Path) -> Path:
    layers = kernels(model(1))
    if kind == "transposed":
        layers["dense"]["kernel"] = layers["dense"]["kernel"].T
    if kind == "missing":
        del layers["dense"]
    if kind == "two":
        layers["other"] = {"dense/bias:0": np.zeros(5)}
    if kind == "unknown":
        layers["lstm"] = {"recurrent_kernel": np.zeros((2, 2))}
    write(path, layers)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    if kind == "text":
        path.write_text("a text")
    if kind == "other":
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros(3)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "transposed",
            "arrays do not fit the model (matched by order): dense.weight has shape (7",
        ),
        ("missing", "arrays do not fit the model (matched by order): linear5.w is missing, linear"),
        ("unknown", "lstm/recurrent_kernel:0 must be one of kernel, depthwise_kernel, bias, gamma"),
        (
            "truncated",
            "expected the layers and arrays of a file that Keras 2 has saved, got one ",
        ),
        (
            "text",
            "expected the layers and arrays of a file that Keras 2 has saved, got one ",
        ),
        (
            "other",
            "expected the layers and arrays of a file that Keras 2 has saved, got one ",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_sentence(
    kind: str, message: str, tmp_path: Path
) -> None:
    path, ours = damaged(kind, tmp_path / "net.h5"), model()
    before = encode(ours.state())
    expected = "^" + re.escape(f"load_keras_weights: {path}: {message}")
    with pytest.raises(ValueError, match=expected):
        load_keras_weights(ours, path)
    assert encode(ours.state()) == before

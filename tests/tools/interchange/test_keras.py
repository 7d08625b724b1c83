"""Weights of Keras, in files with the structures that Keras 2 and 3 write, and by Keras itself."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import (
    GRU,
    LSTM,
    BatchNorm,
    Conv2d,
    Embedding,
    Flatten,
    Linear,
    ReLU,
    ReLU6,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import load
from pydtnn.saving.weights import encode
from pydtnn.tools.interchange import load_keras_weights
from pydtnn.tools.interchange.__main__ import main
from pydtnn.tools.interchange.hdf5 import MORE, TABLE, Hdf5
from tests.each import each

h5py = pytest.importorskip("h5py", reason="h5py is not installed; pip install h5py")

CHANNELS, MULTIPLIER = 4, 2

WHO = "load_keras_weights"


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


def of_norm(state: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays of a norm by their names in Keras."""
    ours = {"moving_mean": "running_mean", "moving_variance": "running_variance"}
    names = ("gamma", "beta", *ours)
    return {theirs: state[f"{name}.{ours.get(theirs, theirs)}"] for theirs in names}


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
        "batch_normalization": of_norm(state, norm),
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
            own.attrs["weight_names"] = np.array([name.encode() for name in names])  # fixed length
            for name, array in zip(names, arrays.values(), strict=True):
                own[name] = array
    return path


CLASSES = {
    "conv2d": "Conv2D",
    "batch_normalization": "BatchNormalization",
    "depthwise_conv2d": "DepthwiseConv2D",
    "dense": "Dense",
    "embedding": "Embedding",
}


def description(names: dict[str, str], **options: Any) -> str:
    """The configuration of a network with layers of these names, by those of `kernels`."""
    layers = [
        {"class_name": CLASSES[layer], "config": {"name": name, **options}}
        for layer, name in names.items()
    ]
    return json.dumps({"class_name": "Sequential", "config": {"name": "net", "layers": layers}})


def write_third(
    path: Path,
    names: dict[str, str],
    arrays: dict[str, dict[str, np.ndarray]] | None = None,
    **options: Any,
) -> Path:
    """Write the file of Keras 3: layers by class and number, arrays by number."""
    inside = path.with_name("model.weights.h5") if path.suffix == ".keras" else path
    arrays = arrays or kernels(model(1))
    with h5py.File(inside, "w") as file:
        file.create_group("optimizer/vars")["0"] = np.zeros((), np.int64)
        file.create_group("layers/dropout/seed_generator/vars")["0"] = np.zeros(2, np.uint32)
        for layer in sorted(names):
            own = file.create_group(f"layers/{layer}/vars")
            own.attrs["name"] = names[layer]
            for i, array in enumerate(arrays[layer].values()):
                own[str(i)] = array
    if path.suffix == ".keras":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", description(names, **options))
            archive.write(inside, "model.weights.h5")
    return path


OWN = {"conv2d": "a", "batch_normalization": "b", "depthwise_conv2d": "c", "dense": "d"}
OURS = ("conv2d0", "batchnorm1", "conv2d3", "linear5")


@each("suffix", [".keras", ".weights.h5"])
@each("by", ["names", "order"])
def test_weights_of_keras_3_are_read(by, suffix, tmp_path):
    names = dict(zip(OWN, OURS, strict=True)) if by == "names" else OWN
    ours = model(0)
    report = load_keras_weights(ours, write_third(tmp_path / f"net{suffix}", names))
    assert report.by == by
    assert encode(ours.state()) == encode(model(1).state())


def test_a_depthwise_convolution_of_keras_3_has_another_name_in_the_older_format(tmp_path):
    layers = kernels(model(1))
    layers["depthwise_conv2d"]["kernel"] = layers["depthwise_conv2d"].pop("depthwise_kernel")
    nested = {
        name: {f"net/{name}/{what}": array for what, array in arrays.items()}
        for name, arrays in layers.items()
    }
    path = write(tmp_path / "net.h5", nested, "model_weights")
    with h5py.File(path, "a") as file:
        file.attrs["model_config"] = description({name: name for name in CLASSES})
    ours = model(0)
    load_keras_weights(ours, path)
    assert encode(ours.state()) == encode(model(1).state())


def test_layers_of_equal_shapes_and_of_different_classes_have_no_order_in_weights_alone(tmp_path):
    """Their groups are sorted by class; the file .keras describes the network."""

    def ours() -> Model:
        return Model(Sequential(Conv2d(1, 2), Conv2d(1, 2)), (5, 5, 1))

    names = {name: f"my_{name}" for name in ("depthwise_conv2d", "conv2d")}
    arrays = {
        name: {"kernel": np.full((2, 2, 1, 1), value), "bias": np.full(1, value)}
        for name, value in zip(names, (1.0, 2.0), strict=True)
    }
    with pytest.raises(ValueError, match=r"conv2d0.w could be my_conv2d.weight, my_depthwise_conv"):
        load_keras_weights(ours(), write_third(tmp_path / "net.weights.h5", names, arrays))
    known = ours()
    load_keras_weights(known, write_third(tmp_path / "net.keras", names, arrays))
    assert known.state()["conv2d0.b"] == 1
    assert known.state()["conv2d1.b"] == 2


@each("third", [False, True])
@each(("option", "removed", "value"), [("scale", "gamma", 1), ("center", "beta", 0)])
def test_embeddings_and_batch_norms_without_factors_or_terms_are_read(
    third, option, removed, value, tmp_path
):
    def ours(seed: int) -> Model:
        net = Sequential(Embedding(7, 4), BatchNorm(), Flatten(), Linear(3))
        made = Model(net, (5,), seed=seed)
        made.statistics.running[:] = np.random.default_rng(seed).uniform(0.5, 1, 1)
        return made

    expected = ours(1)
    expected.load({"batchnorm1.beta": np.ones(4, "float32")}, strict=False)
    expected.load({f"batchnorm1.{removed}": np.full(4, value, "float32")}, strict=False)
    state = expected.state()
    arrays = {
        "embedding": {"embeddings": state["embedding0.w"]},
        "batch_normalization": of_norm(state, "batchnorm1"),
        "dense": {"kernel": state["linear3.w"].T, "bias": state["linear3.b"]},
    }
    del arrays["batch_normalization"][removed]
    names = {name: name for name in arrays}
    path = write(tmp_path / "net.h5", arrays)
    if third:
        path = write_third(tmp_path / "net.keras", names, arrays, **{option: False})
    found = ours(0)
    load_keras_weights(found, path)
    assert encode(found.state()) == encode(state)


def keras_3() -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    if not find_spec("keras"):
        pytest.skip("Keras 3 is not installed; pip install keras")
    pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
    return pytest.importorskip("keras")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
@each("suffix", [".keras", ".h5", ".weights.h5"])
def test_networks_of_keras_3_give_the_same_outputs(suffix, tmp_path):
    keras = keras_3()
    layers = keras.layers
    wide = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="wide")
    inner = [keras.Input((8, 9, 4)), wide, layers.BatchNormalization(), layers.ReLU(6.0)]
    net = keras.Sequential(
        [
            keras.Input((8, 9, 3)),
            layers.Conv2D(4, 3, padding="same", name="first"),
            keras.Sequential(inner, name="inner"),
            layers.DepthwiseConv2D(2, depth_multiplier=2),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    parts = [
        *(Conv2d(4, 3, padding="same"), Conv2d(4, 3, padding="same", groups=4, bias=False)),
        *(BatchNorm(epsilon=1e-3), ReLU6(), Conv2d(8, 2, groups=4), Flatten(), Linear(4)),
    ]
    same_outputs(net, Model(Sequential(*parts), (8, 9, 3)), tmp_path / f"net{suffix}")


def same_outputs(net: Any, ours: Model, path: Path) -> None:
    """Save a network of Keras with random weights, read them, and compare outputs."""
    rng = np.random.default_rng(0)
    net.set_weights([rng.uniform(0.5, 1, w.shape) - (w.ndim > 1) / 2 for w in net.get_weights()])
    write = net.save_weights if path.name.endswith(".weights.h5") else net.save
    write(path)
    load_keras_weights(ours, path)
    x = rng.normal(size=(3, *ours.description.inputs[0][1])).astype("float32")
    expected = net.predict(x, verbose=0)
    # 1e-5: float32 with sums in another order
    np.testing.assert_allclose(ours.predict(x), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
@each("suffix", [".keras", ".h5", ".weights.h5"])
def test_recurrent_networks_of_keras_3_give_the_same_outputs(suffix, tmp_path):
    keras = keras_3()
    layers, steps = keras.layers, {"return_sequences": True}
    bias = suffix == ".weights.h5"  # which does not say what a GRU without biases is
    net = keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.LSTM(4, **steps),
            layers.Bidirectional(layers.GRU(2, **steps)),
            layers.GRU(3, **steps, use_bias=bias),
            layers.Bidirectional(layers.LSTM(3)),
            layers.Dense(2),
        ]
    )
    parts = [
        *(LSTM(4, name="a"), GRU(2, bidirectional=True, name="b"), GRU(3, bias=bias, name="c")),
        *(LSTM(3, bidirectional=True, return_sequences=False, name="d"), Linear(2, name="e")),
    ]
    same_outputs(net, Model(Sequential(*parts), (5, 3)), tmp_path / f"net{suffix}")


def cell_of_keras(state: dict[str, np.ndarray], layer: str) -> dict[str, np.ndarray]:
    """The arrays of a direction in the layout of Keras: gates z, r, h of a GRU, i, f, c, o."""
    w, u, b, b_u = (state[f"{layer}.{name}"] for name in ("w", "u", "b", "b_u"))
    if len(u) == 4 * u.shape[1]:
        return {"kernel": w.T, "recurrent_kernel": u.T, "bias": b + b_u}
    turned = [np.concatenate([np.split(a, 3)[i] for i in (1, 0, 2)]) for a in (w, u, b, b_u)]
    bias = np.stack(turned[2:])
    return {"kernel": turned[0].T, "recurrent_kernel": turned[1].T, "bias": bias}


PLACES = {
    "a.layer0": ("lstm/cell", "a/lstm_cell"),
    "b.layer0": ("bidirectional/forward_layer/cell", "b/forward_gru/gru_cell"),
    "b.layer0_reverse": ("bidirectional/backward_layer/cell", "b/backward_gru/gru_cell_1"),
}
"""Groups of directions in ``.weights.h5`` of Keras 3, and in the older format."""


def test_lstms_and_grus_of_keras_are_read(tmp_path):
    def recurrent(seed: int) -> Model:
        net = Sequential(LSTM(2, name="a"), GRU(3, bidirectional=True, name="b"))
        return Model(net, (4, 3), seed=seed, dtype="float64")

    state, older = recurrent(1).state(), {"a": {}, "b": {}}
    with h5py.File(tmp_path / "third.weights.h5", "w") as file:
        for layer, (group, path) in PLACES.items():
            for i, (what, array) in enumerate(cell_of_keras(state, layer).items()):
                file[f"layers/{group}/vars/{i}"] = array
                older[layer[0]][f"{path}/{what}:0"] = array
    write(tmp_path / "older.h5", older)
    x = np.random.default_rng(0).normal(size=(2, 4, 3))
    for name in ("third.weights.h5", "older.h5"):
        load_keras_weights(found := recurrent(0), tmp_path / name)
        np.testing.assert_allclose(found.predict(x), recurrent(1).predict(x), rtol=1e-12)
    with h5py.File(tmp_path / "third.weights.h5", "a") as file:
        del file["layers/bidirectional/forward_layer/cell/vars/2"]
    with pytest.raises(ValueError, match="whether a GRU without biases has reset_after=True"):
        load_keras_weights(recurrent(0), tmp_path / "third.weights.h5")


@each(("group", "split"), [("/", False), ("model_weights", False), ("/", True)])
def test_weights_of_keras_are_read(group, split, tmp_path):
    ours, other = model(0), model(1)
    path = write(tmp_path / "net.h5", kernels(other), group)
    if split:  # as Keras does with names that are long together
        with h5py.File(path, "a") as file:
            names = list(file.attrs["layer_names"])
            del file.attrs["layer_names"]
            file.attrs["layer_names0"], file.attrs["layer_names1"] = names[:3], names[3:]
    assert load_keras_weights(ours, path).by == "order"
    assert encode(ours.state()) == encode(other.state())


def test_a_group_has_hundreds_of_names(tmp_path):
    with h5py.File(tmp_path / "net.h5", "w") as file:
        for number in range(400):
            file[f"a{number}"] = np.float32([number])
    root = Hdf5((tmp_path / "net.h5").read_bytes()).root
    assert {*root.names()} == {f"a{number}" for number in range(400)}
    assert [root.find(f"a{number}").reader()() for number in (0, 399)] == [[0], [399]]


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "addresses of 4 bytes": ("file", {13: 4}, "the addresses in the file are not of 8 bytes"),
    "lengths of 4 bytes": ("file", {14: 4}, "the addresses in the file are not of 8 bytes"),
    "another version": ("file", {8: 2}, "expected an HDF5 file as Keras writes it"),
    "a user block": ("file", {24: 1}, "the file has a user block"),
    "a header of version 2": ("header", {0: 2}, "'/' has a header of another version"),
    "a shared message": ("header", {20: 2}, "'/' refers to a shared type"),
    "an endless header": ("more", "block", "the header of '/' is endless"),
    "a header behind the end": ("more", "size", "the file is truncated or damaged"),
    "no tree": ("tree", {3: 0}, "the file is damaged: TREE is missing"),
    "no names": ("heap", {3: 0}, "the file is damaged: HEAP is missing"),
    "no entries": ("child", {3: 0}, "the file is damaged: SNOD is missing"),
    "an endless tree": ("child of tree", "tree", "the names in '/' are endless"),
    "entries twice": ("tree", {6: 2}, "the names in '/' are endless"),
    "a deep tree": ("tree", {5: 32}, "the names in '/' are endless"),
    "an entry without a name": ("child", {8: 0}, "a name in '/' is missing"),
    "a name behind the heap": ("child", {10: 255}, "a name in '/' is missing"),
    "no texts": ("texts", {3: 0}, "the file is damaged: GCOL is missing"),
    "another text": ("texts", {16: 99}, "the file is damaged: a text is missing"),
}


@each("kind", DAMAGE)
def test_a_damaged_structure_is_named(kind, tmp_path):
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file["a"] = np.float32([1, 2])
        file.attrs["names"] = ["a", "b"]
        for number in range(9):  # more than fit into the first block of the header
            file.attrs[f"other{number}"] = np.zeros(9)
    data = bytearray((tmp_path / "net.h5").read_bytes())
    root = Hdf5(data).root
    assert (root.names(), root.texts("names")) == (["a"], ["a", "b"])
    tree, heap = struct.unpack("<QQ", root._message(TABLE))
    places = {"file": 0, "header": root.address, "tree": tree, "heap": heap, "size": len(data)}
    places |= {"child of tree": tree + 32, "child": root.file.number(tree + 32, 8)}
    places |= {"block": root.address + 16}
    places |= {"more": data.find(root._messages[MORE][0]), "texts": data.find(b"GCOL")}
    where, what, message = DAMAGE[kind]
    if isinstance(what, str):  # another address
        struct.pack_into("<Q", data, places[where], places[what])
        data[tree + 5] += where == "child of tree"
    else:
        for byte, value in what.items():
            data[places[where] + byte] = value
    data[tree + 48 : tree + 56] = data[tree + 32 : tree + 40]  # a second child
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        (root := Hdf5(data).root).names(), root.texts("names")


def test_layers_are_matched_by_name_and_a_network_in_another_has_names_of_its_own(tmp_path):
    ours, other = model(0), model(1)
    (names, layers), arrays = (["conv2d0", "batchnorm1", "conv2d3", "linear5"], {}), kernels(other)
    for name, own in zip(names, [*arrays.values()][1:], strict=True):
        layers |= {f"{name}/{what}:0": array for what, array in own.items()}
    report = load_keras_weights(ours, write(tmp_path / "net.h5", {"inner": layers}))
    assert report.by == "names"
    assert encode(ours.state()) == encode(other.state())


def test_the_command_imports_weights_of_keras(tmp_path):
    other = Model(create_net("mlp", 3, (2, 2, 1), hidden=(4,)), (2, 2, 1), seed=1)
    state, path = other.state(), tmp_path / "net.h5"
    names = {"dense": "fc1", "dense_1": "fc2"}
    arrays = {k: {"kernel": state[f"{n}.w"].T, "bias": state[f"{n}.b"]} for k, n in names.items()}
    write(path, arrays)
    options = ["--model", "mlp", "--model-options", '{"hidden": [4]}', "--shape", "2,2,1"]
    folder = str(tmp_path / "net.pydtnn")
    assert main(["import", str(path), folder, *options, "--classes", "3"]) == 0
    assert encode(load(folder).state()) == encode(state)


FIRST = "conv2d/conv2d/kernel:0"


def change(kind: str, file: Any, secret: Path) -> None:
    """Replace the kernel of the first convolution, of shape (3, 2, 3, 4), or change the groups."""
    values = file[FIRST][()]
    if kind in HOSTILE_STORAGE:
        del file[FIRST]
    if kind == "external storage":
        file.create_dataset(FIRST, values.shape, "f4", external=[(str(secret), 0, values.nbytes)])
    elif kind == "virtual":
        layout = h5py.VirtualLayout(values.shape, "f4")
        layout[...] = h5py.VirtualSource(str(secret), "x", values.shape)
        file.create_virtual_dataset(FIRST, layout)
    elif kind == "external link":
        file[FIRST] = h5py.ExternalLink(str(secret), "x")
    elif kind == "compressed":
        file.create_dataset(FIRST, data=values, compression="gzip")
    elif kind == "64 GiB":
        file.create_dataset(FIRST, (1 << 34,), "f4")
    elif kind == "integers":
        file[FIRST] = values.astype("i8")
    elif kind == "a name leads upwards":
        file["conv2d"].attrs["weight_names"] = [b"../conv2d/conv2d/kernel:0"]
    elif kind == "groups contain each other":
        del file.attrs["layer_names"]
        own = file.create_group("layers/sequential")
        own["layers"] = file["layers"]
        file.create_group("layers/sequential/vars")["0"] = np.zeros(3, "f4")


HOSTILE_STORAGE = {
    "external storage": f"'{FIRST}' has its values in another file, which is not re",
    "virtual": f"'{FIRST}' has its values in another file, which is not read; copy",
    "external link": "'conv2d/conv2d' has links to other places or files; copy its content",
    "compressed": f"'{FIRST}' is stored in pieces or compressed; save the model ag",
    "64 GiB": f"'{FIRST}' has fewer values than its shape (17179869184,)",
    "integers": f"'{FIRST}' must contain floating-point numbers, such as float32;",
}
HOSTILE = HOSTILE_STORAGE | {
    "a name leads upwards": "'conv2d/..' is missing",
    "groups contain each other": "groups contain each other; the file is damaged",
}


@each("kind", HOSTILE)
def test_files_that_refer_to_others_or_declare_other_sizes_are_refused_without_memory(
    kind, tmp_path
):
    path, secret, ours = write(tmp_path / "net.h5", kernels(model(1))), tmp_path / "secret", model()
    with h5py.File(secret, "w") as file:
        file["x"] = np.zeros((3, 2, 3, 4), "f4")
    with h5py.File(path, "a") as file:
        change(kind, file, secret)
    before = encode(ours.state())
    tracemalloc.start()
    with pytest.raises(ValueError, match="^" + re.escape(f"{WHO}: {path}: {HOSTILE[kind]}")):
        load_keras_weights(ours, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert encode(ours.state()) == before


def test_an_archive_that_becomes_large_is_refused_without_memory(tmp_path):
    path, ours = tmp_path / "net.keras", model()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", description(OWN))
        archive.writestr("model.weights.h5", bytes(24 << 20))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    limit = 32 * sum(array.size for array in ours.state().values()) + (1 << 24)
    with pytest.raises(ValueError, match=rf"become 25165824 B, more than the {limit} B"):
        load_keras_weights(ours, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def transposed(layers: dict[str, Any], path: Path) -> None:
    layers["dense"]["kernel"] = layers["dense"]["kernel"].T
    write(path, layers)


def unknown(layers: dict[str, Any], path: Path) -> None:
    write(path, {**layers, "lstm": {"query_kernel": np.zeros((2, 2))}})


def of_others(layers: dict[str, Any], path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(3)


@each(
    ("make", "message"),
    [
        (transposed, "arrays do not fit the model (matched by order): dense.weight has shape (7"),
        (unknown, "'lstm/query_kernel:0' must be one of kernel, depthwise_kernel, bias, g"),
        (lambda _, path: path.write_text("a text"), "expected an HDF5 file as Keras writes it"),
        (of_others, "expected the layers and arrays of a file that Keras has saved, got none"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_sentence(make, message, tmp_path):
    path, ours = tmp_path / "net.h5", model()
    make(kernels(model(1)), path)
    before = encode(ours.state())
    with pytest.raises(ValueError, match="^" + re.escape(f"{WHO}: {path}: {message}")):
        load_keras_weights(ours, path)
    assert encode(ours.state()) == before

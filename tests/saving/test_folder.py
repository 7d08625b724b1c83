"""The folder of a model is replaced as a whole, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.saving import load, save_model
from pydtnn.saving.folder import MODEL
from pydtnn.saving.models import FORMAT
from pydtnn.saving.weights import WEIGHTS, load_weights
from pydtnn.utils.files import SHA256, fill_folder
from tests.each import each
from tests.saving.networks import residual


def model(seed: int = 0) -> Model:
    return Model(Linear(2), (3,), backend="numpy", seed=seed)


def weights(path: Path) -> bytes:
    return load(path).state()["linear.w"].tobytes()


def test_an_existing_model_is_replaced_and_nothing_else_remains(tmp_path):
    path = tmp_path / "new" / "m.pydtnn"
    path.mkdir(parents=True)  # an empty folder becomes a model
    for seed in (0, 1):
        save_model(model(seed), path)
        assert weights(path) == model(seed).state()["linear.w"].tobytes()
        assert sorted(p.name for p in path.iterdir()) == sorted([WEIGHTS, MODEL, SHA256.file])
        assert [p.name for p in path.parent.iterdir()] == ["m.pydtnn"]


def test_a_folder_with_anything_else_is_not_replaced(tmp_path):
    save_model(model(), tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"^save: folder .*/m is not a saved model, .* notes\.txt"):
        save_model(model(1), tmp_path / "m")
    assert weights(tmp_path / "m") == model().state()["linear.w"].tobytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^save: .*/file is a file, and a model .* as a folder"):
        save_model(model(), tmp_path / "file")
    with pytest.raises(ValueError, match=r"^save: expected the name of a new folder, got /"):
        save_model(model(), "/")


def test_a_failed_replacement_leaves_the_earlier_model(tmp_path, monkeypatch):
    path = tmp_path / "m"
    save_model(model(), path)

    def broken(self: Path, target: Path) -> None:
        if self.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match=r"^save: cannot write .*/m: no space left on device; free"):
        save_model(model(1), path)
    assert weights(path) == model().state()["linear.w"].tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_the_earlier_model_is_found_after_an_interruption_between_two_renames(tmp_path):
    path = tmp_path / "m"
    save_model(model(), path)
    path.rename(tmp_path / ".m.replaced")
    (tmp_path / ".m.partial").mkdir()
    assert weights(path) == model().state()["linear.w"].tobytes()
    save_model(model(1), path)
    assert weights(path) == model(1).state()["linear.w"].tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    other = model()
    load_weights(other, path)
    assert other.state()["linear.w"].tobytes() == model(1).state()["linear.w"].tobytes()


def test_what_is_no_saved_model_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^load: folder .*/none does not exist$"):
        load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"is not a saved model: it does not contain model\.json$"):
        load(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^load: expected the folder .* got the file .*; use pyd"):
        load(tmp_path / "w.safetensors")


Change = Callable[[dict[str, Any]], object]


def layer(place: int, **values: Any) -> Change:
    return lambda content: content["layers"][place].update(values)


def options(**values: Any) -> Change:
    """Change the options of the first layer."""
    return lambda content: content["layers"][0]["options"].update(values)


def last_layer(features: int, *shape: int) -> Change:
    def change(content: dict[str, Any]) -> None:
        last = content["layers"][-1]
        last["options"].update(features=features)
        last.update(shape=shape or last["shape"])

    return change


def samples(**values: Any) -> Change:
    given = {"dtype": "uint8", "mean": [0.5], "std": [0.5], "range": None} | values
    return lambda content: content["inputs"][0].update(samples=given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "m"
    save_model(residual(backend="numpy"), path)
    return path


@each(
    ("change", "message"),
    [
        (lambda c: c.update(format=FORMAT + 1), r"its format must be 1 .*, got 2$"),
        (lambda c: c.update(dtype="int8"), r"model\.json: dtype must be one of float32, "),
        (lambda c: c.pop("layers"), r"model\.json: layers must be a list of objects$"),
        (lambda c: c["layers"].insert(0, 3), r"layer 0 must be an object$"),
        (layer(0, **{"class": "Conv2dd"}), r"layer conv2d0: unknown layer .*; did you mean 'Conv"),
        (layer(0, **{"class": "os:system"}), r"layer conv2d0: system is not a layer of the libr"),
        (options(strides=2), r"layer conv2d0: Conv2d has no option strides$"),
        (options(filters="x"), r"layer conv2d0: Conv2d: filters must be "),
        (options(filters={"call": "exit"}), r"conv2d0: option filters must be a value that was s"),
        (last_layer(10**12), r"layer head: expected an output of shape \(3,\), as saved, got"),
        (last_layer(10**12, 10**12), r"does not fit model\.json: head\.w has shape \(3, 48\) inst"),
        (lambda c: c["inputs"][0].update(shape=[10**9, 10**9, 1]), "conv2d0: expected an output"),
        (layer(1, inputs=["none"]), r"layer batchnorm1: none is not the name of an earlier layer"),
        (layer(1, inputs=["conv2d0", "conv2d0"]), r"BatchNorm: expected one input, got 2"),
        (layer(1, name="conv2d0"), r"names must be unique, got two$"),
        (layer(1, same_as="relu2"), r"layer batchnorm1: relu2 is not the name of an earlier lay"),
        (lambda c: c.update(outputs=["x"]), r"outputs: x is not the name of an earlier"),
        (lambda c: c.update(outputs=[]), r"outputs must be a list of names$"),
        (lambda c: c.update(class_names=[1]), r"class_names must be null, or a list"),
        (samples(range=[1, 0]), r"samples of input 0: range must be null, or the smallest and"),
        (samples(std=[0]), r"samples of input 0: mean and std must have one number for each of"),
    ],
)
def test_wrong_content_with_right_checksums_is_told_in_a_sentence(change, message, saved, tmp_path):
    content = json.loads((saved / MODEL).read_text())
    change(content)
    weights = (saved / WEIGHTS).read_bytes()
    fill_folder(tmp_path / "m", {WEIGHTS: weights, MODEL: json.dumps(content).encode()})
    with pytest.raises(ValueError, match=rf"^load: .*/m: .*{message}"):
        load(tmp_path / "m", backend="numpy")


@each("file", [MODEL, WEIGHTS, SHA256.file])
@each("cut", [0, 1, -1])
def test_a_truncated_or_missing_file_is_told_in_a_sentence(file, cut, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "m")
    data = (saved / file).read_bytes()
    (tmp_path / "m" / file).write_bytes(data[:cut] if file != SHA256.file else data[: cut * 9])
    with pytest.raises(ValueError, match=r"^load: .*/m: .* does not match its checksum"):
        load(tmp_path / "m")
    (tmp_path / "m" / file).unlink()
    with pytest.raises(ValueError, match=rf"^load: .*{file}"):
        load(tmp_path / "m")

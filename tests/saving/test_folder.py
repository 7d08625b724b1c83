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


def test_an_existing_model_is_replaced_and_nothing_else_remains(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.pydtnn"
    for seed in (0, 1):
        save_model(model(seed), path)
        assert weights(path) == model(seed).state()["linear.w"].tobytes()
        assert sorted(p.name for p in path.iterdir()) == sorted([WEIGHTS, MODEL, SHA256.file])
        assert [p.name for p in path.parent.iterdir()] == ["m.pydtnn"]


def test_an_empty_folder_becomes_a_model(tmp_path: Path) -> None:
    save_model(model(), tmp_path)
    assert weights(tmp_path) == model().state()["linear.w"].tobytes()


def test_a_folder_with_anything_else_is_not_replaced(tmp_path: Path) -> None:
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


def test_a_failed_replacement_leaves_the_earlier_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_earlier_model_is_found_after_an_interruption_between_two_renames(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m"
    save_model(model(), path)
    path.rename(tmp_path / ".m.replaced")
    (tmp_path / ".m.partial").mkdir()
    assert weights(path) == model().state()["linear.w"].tobytes()
    save_model(model(1), path)
    assert weights(path) == model(1).state()["linear.w"].tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_is_no_saved_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^load: folder .*/none does not exist$"):
        load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"is not a saved model: it does not contain model\.json$"):
        load(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^load: expected the folder .* got the file .*; use pyd"):
        load(tmp_path / "w.safetensors")


def test_weights_can_be_loaded_from_a_saved_model(tmp_path: Path) -> None:
    save_model(model(), tmp_path / "m")
    other = model(1)
    load_weights(other, tmp_path / "m")
    assert other.state()["linear.w"].tobytes() == model().state()["linear.w"].tobytes()


Change = Callable[[dict[str, Any]], object]

DAMAGE: dict[str, tuple[Change, str]] = {
    "format": (lambda c: c.update(format=FORMAT + 1), r"its format must be 1 .*, got 2$"),
    "dtype": (lambda c: c.update(dtype="int8"), r"model\.json: dtype must be one of float32, "),
    "no layers": (lambda c: c.pop("layers"), r"model\.json: layers must be a list of objects$"),
    "layer": (lambda c: c["layers"].insert(0, 3), r"layer 0 must be an object$"),
    "class": (
        lambda c: c["layers"][0].update({"class": "Conv2dd"}),
        r"layer conv2d0: unknown layer 'Conv2dd'; did you mean 'Conv2d'",
    ),
    "module": (
        lambda c: c["layers"][0].update({"class": "os:system"}),
        r"layer conv2d0: system is not a layer of the library but os:system, which is not imp",
    ),
    "unknown option": (
        lambda c: c["layers"][0]["options"].update(strides=2),
        r"layer conv2d0: Conv2d has no option strides$",
    ),
    "option's type": (
        lambda c: c["layers"][0]["options"].update(filters="x"),
        r"layer conv2d0: Conv2d: filters must be ",
    ),
    "option's content": (
        lambda c: c["layers"][0]["options"].update(filters={"call": "exit"}),
        r"layer conv2d0: option filters must be a value that was saved, got \{'call': 'exit'\}$",
    ),
    "huge option": (
        lambda c: c["layers"][-1]["options"].update(features=10**12),
        r"layer head: expected an output of shape \(3,\), as saved, got \(1000000000000,\)$",
    ),
    "huge layer": (
        lambda c: (
            c["layers"][-1]["options"].update(features=10**12),
            c["layers"][-1].update(shape=[10**12]),
        ),
        r"weights\.safetensors does not fit model\.json: head\.w has shape \(3, 48\) instead of",
    ),
    "shape": (
        lambda c: c["inputs"][0].update(shape=[10**9, 10**9, 1]),
        r"layer conv2d0: expected an output of shape",
    ),
    "inputs": (
        lambda c: c["layers"][1].update(inputs=["none"]),
        r"layer batchnorm1: none is not the name of an earlier layer or input$",
    ),
    "two inputs": (
        lambda c: c["layers"][1].update(inputs=["conv2d0", "conv2d0"]),
        r"BatchNorm: expected one input, got 2",
    ),
    "output": (lambda c: c.update(outputs=["x"]), r"outputs: x is not the name of an earlier"),
    "no output": (lambda c: c.update(outputs=[]), r"outputs must be a list of names$"),
    "name": (lambda c: c["layers"][1].update(name="conv2d0"), r"names must be unique, got two$"),
    "same as": (
        lambda c: c["layers"][1].update(same_as="relu2"),
        r"layer batchnorm1: relu2 is not the name of an earlier layer",
    ),
    "classes": (lambda c: c.update(class_names=[1]), r"class_names must be null, or a list"),
    "range": (
        lambda c: c["inputs"][0].update(
            samples={"dtype": "uint8", "mean": [0.5], "std": [0.5], "range": [1, 0]}
        ),
        r"samples of input 0: range must be null, or the smallest and the largest value$",
    ),
    "std": (
        lambda c: c["inputs"][0].update(
            samples={"dtype": "uint8", "mean": [0.5], "std": [0], "range": None}
        ),
        r"samples of input 0: mean and std must have one number for each of the 1 channels",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "m"
    save_model(residual(backend="numpy"), path)
    return path


@each("name", DAMAGE)
def test_wrong_content_with_right_checksums_is_told_in_a_sentence(
    name: str, saved: Path, tmp_path: Path
) -> None:
    change, message = DAMAGE[name]
    content = json.loads((saved / MODEL).read_text())
    change(content)
    files = {
        WEIGHTS: (saved / WEIGHTS).read_bytes(),
        MODEL: json.dumps(content).encode(),
    }
    fill_folder(tmp_path / "m", files)
    with pytest.raises(ValueError, match=rf"^load: .*/m: .*{message}"):
        load(tmp_path / "m", backend="numpy")


@each("file", [MODEL, WEIGHTS, SHA256.file])
@each("cut", [0, 1, -1])
def test_a_truncated_or_missing_file_is_told_in_a_sentence(
    file: str, cut: int, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    data = (saved / file).read_bytes()
    (tmp_path / "m" / file).write_bytes(data[:cut] if file != SHA256.file else data[: cut * 9])
    with pytest.raises(ValueError, match=r"^load: .*/m: .* does not match its checksum"):
        load(tmp_path / "m")
    (tmp_path / "m" / file).unlink()
    with pytest.raises(ValueError, match=rf"^load: .*{file}"):
        load(tmp_path / "m")


def test_the_weights_of_another_model_are_told(saved: Path, tmp_path: Path) -> None:
    save_model(model(), tmp_path / "other")
    files = {
        WEIGHTS: (tmp_path / "other" / WEIGHTS).read_bytes(),
        MODEL: (saved / MODEL).read_bytes(),
    }
    fill_folder(tmp_path / "m", files)
    with pytest.raises(ValueError, match=r"does not fit model\.json: conv2d0\.w has shape none"):
        load(tmp_path / "m")

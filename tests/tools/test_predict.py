"""The command that predicts the classes of image files."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import load_dataset, load_folder
from pydtnn.data.inputs import Input, Inputs, inputs_of
from pydtnn.layers import Flatten, Identity, Linear, Sequential, Softmax
from pydtnn.model import Model
from pydtnn.models.auxiliary import Heads
from pydtnn.saving import load, save_model
from pydtnn.tools.predict import main, read_image
from pydtnn.tools.runs import load_run
from pydtnn.train import main as train
from pydtnn.utils.imports import import_object
from tests.data.image_files import write_image
from tests.each import each

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")


def digits(*last: Softmax | Identity) -> Model:
    model = Model(Sequential(Flatten(), Linear(10), *last), (8, 8, 1), backend="numpy")
    model.inputs = inputs_of(load_dataset("digits")[0])
    return model


def saved(model: Model, folder: Path, *images: NDArray[np.uint8]) -> list[str]:
    """The paths of a model that is saved into a folder, and of grey images beside it."""
    paths = [str(folder / "m.pydtnn"), *(str(folder / f"{k}.png") for k in range(len(images)))]
    save_model(model, paths[0])
    for path, image in zip(paths[1:], images, strict=True):
        Image.fromarray(image).save(path)
    return paths


BLACK = np.zeros((8, 8), np.uint8)


@each("last", [[], [Softmax]])
def test_the_class_and_its_probability_are_printed(last, tmp_path, capsys):
    model = digits(*(kind() for kind in last))
    x, _ = load_dataset("digits")[1].read(np.arange(2))
    file, *paths = saved(model, tmp_path, *x[..., 0])
    assert main([file, *paths, "--device=numpy", "--top=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    y = model.predict(x).astype(np.float64)
    y = y if last else np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    for path, line, scores in zip(paths, lines, y, strict=True):
        first, second = np.argsort(-scores)[:2]
        assert line == f"{path}: {first} {scores[first]:.3g}, {second} {scores[second]:.3g}"


def test_names_of_classes_of_a_stranger_are_printed_in_one_line_without_control_characters(
    tmp_path, capsys
):
    model, names = digits(), tuple(f"\x1b[2J{n}\x07\nother.png: dog\u202e" for n in range(10))
    model.inputs = replace(model.inputs, class_names=names)
    assert main(saved(model, tmp_path, BLACK)) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.rstrip("\n").isprintable()
    assert r"\x1b[2J" in out
    assert r"\nother.png: dog\u202e" in out


@each(("task", "outputs"), [("numbers", 2), ("labels", 2), ("labels", 1)])
def test_numbers_and_independent_labels_are_printed(task, outputs, tmp_path, capsys):
    model = Model(Sequential(Flatten(), Linear(outputs)), (8, 8, 1), backend="numpy")
    model.inputs = replace(inputs_of(load_dataset("digits")[0]), tasks=(task,), class_names=None)
    file, path = saved(model, tmp_path, BLACK + 100)
    assert main([file, path, "--device=numpy", "--top=2"]) == 0
    y = model.predict((BLACK + 100)[None, ..., None])[0].astype(np.float64)
    likely = 1 / (1 + np.exp(-y))
    likely = likely if outputs > 1 else np.array([1 - likely[0], likely[0]])
    expected = [f"{k} {likely[k]:.3g}" for k in np.argsort(-likely)]
    if task == "numbers":
        expected = [f"{number:.6g}" for number in y]
    assert capsys.readouterr().out == f"{path}: {', '.join(expected)}\n"


def test_images_of_a_folder_are_resized_and_cropped_as_those_of_a_data_set(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for kind in ("train", "val"):
        for k, size in enumerate([(40, 23), (23, 40), (8, 8), (10, 6), (9, 70)]):
            path = tmp_path / kind / f"class{k % 2}" / f"{k}.{'jpg' if k % 3 else 'png'}"
            write_image(path, rng.integers(256, size=(*size, 3), dtype=np.uint8), quality=95)
    model = Model(Sequential(Flatten(), Linear(2)), (8, 8, 3), backend="numpy")
    model.inputs = Inputs((Input((8, 8, 3), "uint8", None, (0.0, 255.0)),))
    dataset = load_folder(data_dir=tmp_path, image_size=8)[1]
    x, _ = dataset.read(np.arange(5))
    np.testing.assert_array_equal([read_image(path, model)[0] for path in dataset.paths], x)
    assert main([*saved(model, tmp_path), str(tmp_path / "val"), "--device=numpy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [*map(str, dataset.paths)]


def test_auxiliary_outputs_are_not_read(tmp_path, capsys):
    parts = (Flatten(name="flat"), Linear(10, name="last"))
    net = Heads(*parts, heads={"flat": Linear(10, name="early")})
    model = Model(net, (8, 8, 1), backend="numpy")
    model.inputs = inputs_of(load_dataset("digits")[0])
    model.load({"last.b": np.eye(10)[3] * 99, "early.b": np.zeros(10)}, strict=False)
    file, path = saved(model, tmp_path, BLACK)
    assert main([file, path]) == 0
    assert capsys.readouterr().out == f"{path}: 3 1\n"


def test_what_cannot_be_predicted_is_told_in_a_sentence(tmp_path, capsys):
    saved, image = str(tmp_path / "m.pydtnn"), str(tmp_path / "image.png")
    save_model(digits(), saved)
    (tmp_path / "image.png").write_text("no image")
    numbers = str(tmp_path / "numbers.pydtnn")
    save_model(Model(Linear(2), (4,), backend="numpy"), numbers)
    for arguments, message in (
        ([saved, image], f"predict: expected a PNG, JPEG or WebP image in {image}, got other or "),
        ([saved, "none.png"], "predict: "),
        ([str(tmp_path / "none"), image], "load: folder "),
        ([numbers, image], "predict: expected a model of images of shape "),
        ([saved, image, "--custom=none.py:Own"], "--custom: file none.py does not exist"),
    ):
        assert main(arguments) == 1
        printed, told = capsys.readouterr()
        assert (printed, told.count("\n")) == ("", 1)
        assert told.startswith(message)


def test_a_layer_of_a_file_is_imported_only_if_it_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from pydtnn.layers import Identity\nclass Own(Identity): pass\n")
    own = import_object("own.py:Own", "test")
    save_model(digits(own()), "m.pydtnn")
    Image.new("L", (8, 8)).save("black.png")
    assert main(["m.pydtnn", "black.png"]) == 1
    assert "Own is not a layer of the library but own.py:Own" in capsys.readouterr().err
    assert main(["m.pydtnn", "black.png", "--custom=own.py:Own"]) == 0
    assert capsys.readouterr().out.startswith("black.png: ")


def test_the_folder_of_a_run_has_its_best_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--model=mlp", "--dataset=digits", "--threads=1", "--quiet", "--epochs=1"]
    assert train([*options, "--output-dir=run"]) == 0
    x, _ = load_dataset("digits")[1].read(np.arange(1))
    Image.fromarray(x[0, ..., 0]).save("0.png")
    capsys.readouterr()
    assert main(["run", "0.png", "--top=2"]) == 0
    y = load_run("run").model("best").predict(x)[0].astype(np.float64)
    first, second = np.argsort(-y)[:2]
    p = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
    assert capsys.readouterr().out == f"0.png: {first} {p[first]:.3g}, {second} {p[second]:.3g}\n"
    np.testing.assert_array_equal(load("run").predict(x)[0], y.astype(np.float32))
    assert train([*options, "--output-dir=next", "--load=run"]) == 0
    Path("run/best.safetensors").unlink()
    assert main(["run", "0.png"]) == 1
    assert "run contains no weights; a run has best.safetensors after" in capsys.readouterr().err


def test_the_probabilities_of_all_classes_are_written_to_a_table(tmp_path, capsys):
    model = digits()
    names = ("a,b", "caf\u00e9", *map(str, range(8)))
    model.inputs = replace(model.inputs, class_names=names)
    x, _ = load_dataset("digits")[1].read(np.arange(3))
    (tmp_path / "images").mkdir()
    file = Path(saved(model, tmp_path / "images", *x[..., 0])[0]).rename(tmp_path / "m.pydtnn")
    arguments = [str(file), str(tmp_path / "images"), "--device=numpy"]
    assert main([*arguments, f"--csv={tmp_path / 'out' / 'p.csv'}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    with open(tmp_path / "out" / "p.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "class", *names]
    y = model.predict(x).astype(np.float64)
    y = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    assert [row[1] for row in rows] == [names[k] for k in y.argmax(axis=1)]
    np.testing.assert_allclose([[float(n) for n in row[2:]] for row in rows], y, rtol=1e-5)
    assert [Path(row[0]).name for row in rows] == ["0.png", "1.png", "2.png"]
    (tmp_path / "images" / "3.png").write_bytes(b"nothing")
    assert main([*arguments, f"--csv={tmp_path / 'other.csv'}"]) == 1
    assert not (tmp_path / "other.csv").exists()

"""Runs and weights are not used for other classes, sizes and tokenizers than those of training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pydtnn.train import main
from tests.data.image_files import write_images
from tests.small_run import only_line

Capture = pytest.CaptureFixture[str]

DATA = ["--dataset=folder", "--data-dir=data", "--batch-size=8", "--threads=1", "--image-size=6"]
TRAIN = [*DATA, "--model=net.py:pooled", "--lr=0.001", "--epochs=1"]

NET = """
from pydtnn.layers import Conv2d, GlobalAvgPool2d, Linear, Sequential

def pooled(classes, input_shape):
    return Sequential(Conv2d(2, 3), GlobalAvgPool2d(), Linear(classes))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of the classes ant, bee and cat, a run, and its model."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_images(root / "data")
        (root / "net.py").write_text(NET)
        assert main([*TRAIN, "--quiet", "--output-dir=run", "--save=net.pydtnn"]) == 0
    return root


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


def rename(place: Path, **names: str) -> None:
    """Rename classes, in both parts."""
    for part in ("train", "val"):
        for old in names:
            (place / "data" / part / old).rename(place / "data" / part / f".{old}")
        for old, new in names.items():
            (place / "data" / part / f".{old}").rename(place / "data" / part / new)


COMMANDS = {
    "resume": ["--resume=run", "--epochs=2"],
    "evaluate": ["--resume=run", "--evaluate-only"],
    "load": [*TRAIN, "--output-dir=new", "--load=net.pydtnn"],
    "load the best": [*TRAIN, "--output-dir=new", "--load=run/best.safetensors"],
    "evaluate a model": [*TRAIN, "--evaluate-only", "--load=net.pydtnn"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_other_classes_are_refused(command, place, capsys):
    rename(place, ant="dog")
    assert main(COMMANDS[command]) == 1
    told = only_line(capsys.readouterr().err)
    assert "class 0 bee instead of ant, class 1 cat instead of bee, class 2 dog instead of" in told
    assert not (place / "new").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_another_size_of_images_is_refused(command, place, capsys):
    assert main([*COMMANDS[command], "--image-size=7"]) == 1
    told = only_line(capsys.readouterr().err)
    assert "samples of shape (7, 7, 3) instead of (6, 6, 3)" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_another_mean_and_deviation_are_a_warning(command, place, capsys):
    write_images(place / "data", seed=1)
    if "evaluate" in command or "resume" in command:
        with pytest.warns(UserWarning, match="is normalised with its own statistics"):
            assert main(COMMANDS[command]) == 0
    else:
        assert main(COMMANDS[command]) == 0
        assert "mean and deviation of folder are not those of" in capsys.readouterr().err

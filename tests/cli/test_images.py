"""Training on images from files, on one and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pydtnn.train import main
from pydtnn.utils.tools import find_tool
from tests.data.image_files import pixels_of, write_images
from tests.small_run import TRAIN, only_line

OPTIONS = [
    *("--model=mlp", "--exact", "--shards=4", "--global-batch-size=5", "--epochs=2"),
    *("--threads=1", "--augment=crop:1,flip", "--quiet", "--straggler-factor=0"),
]

OWN = """
import numpy as np
from pydtnn.data import ArrayDataset

def load(path):
    arrays = np.load(path)
    train = ArrayDataset(arrays["x"], arrays["y"])
    return train, ArrayDataset(arrays["held"], arrays["held_y"], like=train)
"""


def write_sources(tmp_path: Path, suffix: str) -> dict[str, list[str]]:
    """Options that name the same images: as arrays, in a folder, and in shards."""
    root = write_images(tmp_path / "images", suffix)
    (x, y), (held, held_y) = (pixels_of(root / part) for part in ("train", "val"))
    np.savez(tmp_path / "arrays.npz", x=x, y=y, held=held, held_y=held_y)
    (tmp_path / "own.py").write_text(OWN)
    sources = {
        "arrays": [
            f"--dataset={tmp_path / 'own.py'}:load",
            f"--dataset-options.path={tmp_path / 'arrays.npz'}",
        ],
        "folder": ["--dataset=folder", f"--data-dir={root}"],
    }
    if (tool := find_tool("shards")) is not None:
        tool.pack_shards(root, tmp_path / "shards", shard_bytes=1500)
        sources["shards"] = ["--dataset=shards", f"--data-dir={tmp_path / 'shards'}"]
    return sources


@pytest.mark.parametrize(
    ("suffix", "ranks"), [("png", 1), pytest.param("jpg", 2, marks=pytest.mark.long)]
)
def test_weights_are_the_same_bytes_from_files_shards_and_arrays_on_1_and_2_ranks(
    suffix, ranks, tmp_path, mpiexec
):
    weights = set()
    for name, source in write_sources(tmp_path, suffix).items():
        out, file = tmp_path / name, tmp_path / f"{name}.safetensors"
        arguments = [*OPTIONS, *source, f"--output-dir={out}", f"--save={file}"]
        if ranks == 1 or name == "arrays":
            assert main(arguments) == 0
        else:
            done = mpiexec(ranks, [*TRAIN, *arguments])
            assert (done.returncode, done.stderr) == (0, "")
        weights.add(file.read_bytes())
    assert len(weights) == 1


@pytest.mark.long
def test_a_damaged_image_ends_two_ranks_with_one_sentence(tmp_path, mpiexec):
    root = write_images(tmp_path / "images")
    path = root / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:50])
    source = ["--dataset=folder", f"--data-dir={root}", f"--output-dir={tmp_path / 'run'}"]
    done = mpiexec(2, [*TRAIN, *OPTIONS, *source])
    assert done.returncode == 1
    line = only_line(done.stderr)
    assert line.startswith("rank 1: folder: ")
    assert "train/cat/2.png" in line


def test_a_run_of_an_earlier_version_continues_without_turning_photographs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    root = write_images(tmp_path / "images")
    options = ["--dataset=folder", f"--data-dir={root}", "--model=mlp", "--output-dir=runs/a"]
    with monkeypatch.context() as earlier:
        earlier.setattr("pydtnn.data.images.TURNED", None)  # it was not stored
        assert main([*options, "--epochs=1"]) == 0
    path = tmp_path / "runs/a/run.json"
    about = json.loads(path.read_text())
    assert about["configuration"].pop("exif_rotation") is True
    path.write_text(json.dumps(about))
    capsys.readouterr()
    assert main(["--resume", "runs/a", "--epochs=2"]) == 0
    assert "--dataset exif_rotation true -> false" in capsys.readouterr().out
    assert json.loads(path.read_text())["configuration"]["exif_rotation"] is False
    assert main(["--resume", "runs/a", "--epochs=3"]) == 0
    assert "exif_rotation true ->" not in capsys.readouterr().out
    assert main(["--resume", "runs/a", "--epochs=4", "--exif-rotation"]) == 1
    assert "encoding photographs upright instead of" in capsys.readouterr().err


def test_bad_files_are_omitted_by_an_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = write_images(tmp_path / "images")
    (root / "train/bee/Thumbs.db").write_bytes(b"text")
    options = ["--dataset=folder", f"--data-dir={root}", "--model=mlp", "--epochs=1"]
    assert main(options) == 1
    line = only_line(capsys.readouterr().err)
    assert line.startswith("folder: ")
    assert "Thumbs.db is not named as a PNG" in line
    assert not (tmp_path / "runs").exists()
    assert main([*options, "--skip-bad"]) == 0
    printed = capsys.readouterr()
    assert "Thumbs.db is not named as a PNG" in printed.out + printed.err

"""Training on images from files, on one and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pydtnn.data import pack_shards
from pydtnn.train import main
from tests.data.image_files import pixels_of, write_images
from tests.each import each
from tests.launch import Finished
from tests.small_run import TRAIN, only_line

OPTIONS = [
    *("--model=mlp", "--exact", "--shards=4", "--global-batch-size=5", "--epochs=2"),
    *("--threads=1", "--augment=crop:1,flip", "--quiet"),
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
    pack_shards(root, tmp_path / "shards", shard_bytes=1500)
    (x, y), (held, held_y) = (pixels_of(root / part) for part in ("train", "val"))
    np.savez(tmp_path / "arrays.npz", x=x, y=y, held=held, held_y=held_y)
    (tmp_path / "own.py").write_text(OWN)
    return {
        "arrays": [
            f"--dataset={tmp_path / 'own.py'}:load",
            f"--dataset-options.path={tmp_path / 'arrays.npz'}",
        ],
        "folder": ["--dataset=folder", f"--data-dir={root}"],
        "shards": ["--dataset=shards", f"--data-dir={tmp_path / 'shards'}"],
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("suffix", "on_two"),
    [("png", "shards"), pytest.param("jpg", "folder", marks=pytest.mark.long)],
)
def test_weights_are_the_same_bytes_from_files_shards_and_arrays_on_1_and_2_ranks(
    suffix: str,
    on_two: str,
    tmp_path: Path,
    mpiexec: Callable[..., Finished],
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights, printed = {}, set()
    for name, source in write_sources(tmp_path, suffix).items():
        for ranks in (1, 2) if name == on_two else (1,):
            out, file = tmp_path / f"{name}{ranks}", tmp_path / f"{name}{ranks}.safetensors"
            arguments = [*OPTIONS, *source, f"--output-dir={out}", f"--save={file}"]
            if ranks == 1:
                assert main(arguments) == 0
                printed.add(capsys.readouterr().out)
            else:
                done = mpiexec(ranks, [*TRAIN, *arguments])
                assert (done.returncode, done.stderr) == (0, "")
                printed.add(done.stdout)
            weights[name, ranks] = file.read_bytes()
    assert len(printed) == 1  # the results of the last epoch
    assert set(weights.values()) == {weights["arrays", 1]}


@each(
    ("name", "content", "words"),
    [
        ("train/bee/3.png", b"\x89PNG\r\n\x1a\n", "train/bee/3.png"),
        ("val/cat/0.png", b"text", "val/cat/0.png"),
        ("train/bee/notes.txt", b"text", "train/bee/notes.txt"),
        ("val/dog/0.png", b"", "contains the class dog, which"),
    ],
)
def test_a_bad_image_is_one_sentence_before_training(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_images(tmp_path / "images")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(content)
    out = tmp_path / "run"
    source = ["--dataset=folder", f"--data-dir={root}", f"--output-dir={out}"]
    assert main([*OPTIONS, *source]) == 1
    line = only_line(capsys.readouterr().err)
    assert line.startswith("folder: ")
    assert words in line
    assert not out.exists()


def test_a_damaged_image_ends_two_ranks_with_one_sentence(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    root = write_images(tmp_path / "images")
    path = root / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:50])
    source = ["--dataset=folder", f"--data-dir={root}", f"--output-dir={tmp_path / 'run'}"]
    done = mpiexec(2, [*TRAIN, *OPTIONS, *source])
    assert done.returncode == 1
    line = only_line(done.stderr)
    assert line.startswith("rank 1: folder: ")
    assert "train/cat/2.png" in line


def test_a_size_makes_samples_of_all_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_images(tmp_path / "images")
    write_images(tmp_path / "other", shape=(9, 12, 3))
    (tmp_path / "other" / "train" / "ant" / "0.png").replace(root / "train" / "ant" / "0.png")
    source = ["--dataset=folder", f"--data-dir={root}", f"--output-dir={tmp_path / 'run'}"]
    assert main([*OPTIONS, *source]) == 1
    assert "set --image-size N, to which all are resized" in only_line(capsys.readouterr().err)
    assert main([*OPTIONS, *source, "--image-size=8"]) == 0
    assert main([*OPTIONS, "--image-size=8"]) == 1
    error = only_line(capsys.readouterr().err)
    assert "--image-size: synthetic has no parameter `image_size`; omit it or use folder" in error


@pytest.mark.long
def test_ranks_train_on_the_copy_that_one_of_them_makes(
    tmp_path: Path, mpiexec: Callable[..., Finished], capsys: pytest.CaptureFixture[str]
) -> None:
    local = tmp_path / "local"
    arguments = [*OPTIONS, *write_sources(tmp_path, "png")["shards"], f"--stage={local}"]
    weights = [tmp_path / f"{ranks}.safetensors" for ranks in (1, 2)]
    done = mpiexec(
        2, [*TRAIN, *arguments, f"--output-dir={tmp_path / 'b'}", f"--save={weights[1]}"]
    )
    assert (done.returncode, done.stderr) == (0, "")
    copied = {path: path.stat().st_ino for path in local.rglob("*.tar")}
    assert copied
    first = tmp_path / "shards" / "train" / "shard-000000.tar"
    first.write_bytes(bytes(first.stat().st_size))  # from now on only the copy is whole
    assert main([*arguments, f"--output-dir={tmp_path / 'a'}", f"--save={weights[0]}"]) == 0
    assert capsys.readouterr().out == done.stdout
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert {path: path.stat().st_ino for path in local.rglob("*.tar")} == copied


def test_a_run_of_an_earlier_version_continues_without_turning_photographs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "--exif-rotation true -> false" in capsys.readouterr().out
    assert json.loads(path.read_text())["configuration"]["exif_rotation"] is False
    assert main(["--resume", "runs/a", "--epochs=3"]) == 0
    assert "--exif-rotation" not in capsys.readouterr().out
    assert main(["--resume", "runs/a", "--epochs=4", "--exif-rotation"]) == 1
    assert "encoding photographs upright instead of" in capsys.readouterr().err


def test_bad_files_are_omitted_by_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = write_images(tmp_path / "images")
    (root / "train/bee/Thumbs.db").write_bytes(b"text")
    options = ["--dataset=folder", f"--data-dir={root}", "--model=mlp", "--epochs=1"]
    assert main(options) == 1
    assert "Thumbs.db is not named as a PNG" in capsys.readouterr().err
    assert main([*options, "--skip-bad"]) == 0
    printed = capsys.readouterr()
    assert "Thumbs.db is not named as a PNG" in printed.out + printed.err
    assert main(["--dataset=synthetic", "--skip-bad"]) == 1
    assert "--skip-bad: synthetic has no parameter `skip_bad`" in capsys.readouterr().err

"""The command that lists and verifies checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pydtnn.tools.checkpoint import main
from pydtnn.training.checkpoint import find_checkpoints
from tests.each import each
from tests.small_training import trained


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(tmp_path / "run")
    return tmp_path / "run"


def flip_a_bit(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_checkpoints_are_listed(run, capsys):
    (find_checkpoints(run)[0] / "state.json").unlink()
    assert main(["list", str(run)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "step", "epoch", "files", "arrays", "size"]
    assert "checkpoint-00000004" in first
    assert "damaged: state.json cannot be read" in first
    assert second.split()[:4] == ["checkpoint-00000008", "8", "2", "1"]


def test_a_flipped_bit_is_found(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": good, ") == 2
    flip_a_bit(find_checkpoints(run)[-1] / "arrays.safetensors")
    assert main(["verify", str(run)]) == 1
    out, told = capsys.readouterr()
    assert "checkpoint-00000008: arrays.safetensors does not match its checksum" in out
    assert told.startswith("pydtnn checkpoint: 1 of 2 checkpoints are damaged; ")
    assert len(told.splitlines()) == 1


@each("name", ["state.json", "XXH64SUMS", "arrays.safetensors"])
def test_a_file_that_is_outside_of_its_checkpoint_is_damaged(name, run, tmp_path, capsys):
    shutil.copytree(find_checkpoints(run)[-1], path := tmp_path / "copy" / "checkpoint-00000008")
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    assert main(["verify", str(path.parent)]) == 1
    out = capsys.readouterr().out
    assert "checkpoint-00000008: " in out
    assert f"a link to {tmp_path / name}" in out


@each("command", ["list", "verify"])
def test_a_folder_without_checkpoints_is_an_error_in_one_line(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "none")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1

"""The command that lists, verifies, compares and repairs checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from pydtnn.cli.run_directory import claim
from pydtnn.tools.checkpoint import main
from pydtnn.training.checkpoint import find_checkpoints, layout, load_checkpoint, save_checkpoint
from pydtnn.utils.files import fill_folder
from tests.each import each
from tests.small_training import small_trainer, trained


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


def test_differences_are_printed_with_their_size(run, capsys):
    trainer = small_trainer()
    load_checkpoint(run, trainer)
    path = save_checkpoint(run.with_name("one"), trainer)
    trainer.model.parameters["head.w"].master[0, 0] += 0.5
    other = save_checkpoint(run.with_name("other"), trainer)
    older = run.with_name("older")  # with sums of another kind, but the same content
    fill_folder(older, {file.name: file.read_bytes() for file in path.iterdir() if file.suffix})
    assert (older / "SHA256SUMS").exists()
    for same in (path, older):
        assert main(["diff", str(path), str(same)]) == 0
        assert capsys.readouterr().out == "equal\n"
    assert main(["diff", str(path), str(other.parent)]) == 1
    out, told = capsys.readouterr()
    _, row, total = out.splitlines()
    name, *numbers = row.split()
    assert name == "model/head.w"
    assert numbers[:3] == ["1", "of", f"{trainer.model.parameters['head.w'].size}"]
    assert float(numbers[3]) == pytest.approx(0.5, abs=1e-3)
    assert " of " in total
    assert total.endswith(" arrays differ")
    assert told == f"pydtnn checkpoint: {path} and {other} differ\n"
    assert main(["diff", *map(str, find_checkpoints(run)), "--top=99"]) == 1
    out = capsys.readouterr().out
    assert "step: 4 -> 8" in out
    assert "parts.trainer[0].epoch: 1 -> 2" in out


def test_a_damaged_checkpoint_is_put_aside(run, capsys):
    old, new = find_checkpoints(run)
    flip_a_bit(new / "arrays.safetensors")
    (run / ".checkpoint-00000012.partial").mkdir()
    assert main(["repair", str(run)]) == 0
    partial, damaged = capsys.readouterr().out.splitlines()
    assert ".checkpoint-00000012.partial: removed" in partial
    assert damaged.endswith("put aside as .checkpoint-00000008.damaged")
    assert find_checkpoints(run) == [old]
    assert main(["repair", str(run)]) == 0
    assert capsys.readouterr().out == "nothing to repair\n"


def test_a_file_is_repaired_from_another_checkpoint_with_the_same_content(
    tmp_path, capsys, monkeypatch
):
    """As that of parameters that are frozen."""
    monkeypatch.setattr(layout, "FILE_BYTES", 200)
    trainer = small_trainer()
    path = save_checkpoint(tmp_path, trainer)
    trainer.optimizer.iterations += 1
    save_checkpoint(tmp_path, trainer)
    damaged = sorted(path.glob("arrays-*"))[:2]
    before = damaged[0].read_bytes()
    flip_a_bit(damaged[0], at=-1)
    damaged[1].unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["repair", str(tmp_path)]) == 0
    names = ", ".join(file.name for file in damaged)
    assert f"checkpoint-00000000: {names} copied from another" in capsys.readouterr().out
    assert damaged[0].read_bytes() == before
    assert main(["verify", str(tmp_path)]) == 0


def test_nothing_is_repaired_while_a_run_is_writing(run, capsys):
    with contextlib.ExitStack() as held:
        claim(run, held)
        assert main(["repair", str(run)]) == 1
    assert "a run is writing in" in capsys.readouterr().err


@each("command", ["list", "verify", "repair", "diff"])
def test_a_folder_without_checkpoints_is_an_error_in_one_line(command, tmp_path, capsys):
    folders = [str(tmp_path / "none")] * (2 if command == "diff" else 1)
    assert main([command, *folders]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1

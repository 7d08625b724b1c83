"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydtnn.callbacks import Checkpointer
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import RunFolder, remove_unfinished_files, run_directory
from pydtnn.comm import Communicator, Serial
from pydtnn.train import main
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import Recorder, small_fit, small_trainer


@pytest.mark.threads(1, 2)
def test_a_folder_in_which_another_run_is_writing_is_refused(
    comm: Communicator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=str(tmp_path / "run"), resume=True)
    words = f"--output-dir: another run is writing in {tmp_path / 'run'}; wait until it ends, or"
    with run_directory(config, comm) as path:
        (path / "something").touch()
        comm.barrier()
        with pytest.raises(AgreedError, match=words), run_directory(config, comm):
            pass
        assert path.exists()
    with run_directory(config, comm):
        comm.barrier()


def test_a_name_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path / ("x" * 300)))
    with (
        pytest.raises(AgreedError, match="^train: --output-dir: cannot write .*: file name too l"),
        run_directory(config, Serial()),
    ):
        pass


def test_a_folder_can_be_looked_at_meanwhile(tmp_path: Path) -> None:
    name = str(tmp_path)
    looking = TrainConfig(output_dir=name, resume=True, evaluate_only=True)
    with run_directory(TrainConfig(output_dir=name), Serial()), run_directory(looking, Serial()):
        pass


KILLED = """
import os, signal, sys
from pydtnn.comm import Serial
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import RunFolder, remove_unfinished_files, run_directory
from pydtnn.train import main
from tests.small_run import TINY
from tests.small_training import Recorder, small_fit, small_trainer
with run_directory(TrainConfig(output_dir=sys.argv[1]), Serial()) as path:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_gives_its_folder_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with run_directory(TrainConfig(output_dir=str(tmp_path)), Serial()) as path:
        assert path == tmp_path


def test_what_killed_runs_left_in_a_folder_is_removed_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00000003.partial").mkdir()
    (tmp_path / ".checkpoint-00000003.partial" / "state.json").touch()
    names = "history.csv", "history.json", "run.json", "best.safetensors"
    for name in names:
        (tmp_path / f".{name}.{'0f' * 16}").touch()
    others = [".best.safetensors.backup", ".notes.txt." + "0f" * 16, ".checkpoint-3.partial", "x"]
    for name in others:
        (tmp_path / name).touch()
    before = sorted(tmp_path.iterdir())
    with run_directory(TrainConfig(output_dir=str(tmp_path)), Serial()):
        assert sorted(tmp_path.iterdir()) == before  # the run may still be refused
        remove_unfinished_files(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_another_run_is_writing_is_not_taken_for_something_left(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path))
    with run_directory(config, Serial()):
        (tmp_path / ".checkpoint-00000003.partial").mkdir()
        with (
            pytest.raises(AgreedError, match="another run is writing"),
            run_directory(config, Serial()),
        ):
            pass
        assert (tmp_path / ".checkpoint-00000003.partial").exists()


LOST = "was removed or renamed while the run was writing in it"


@each("how", ["removed", "renamed"])
def test_a_folder_that_is_lost_is_told_at_the_next_write_and_the_run_fails_with_its_results_written(
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    look = RunFolder.on_epoch_end

    def lose(self: RunFolder, trainer: object) -> None:
        if trainer.epoch == 1:  # type: ignore[attr-defined]
            shutil.rmtree(run) if how == "removed" else run.rename(elsewhere)
        look(self, trainer)  # type: ignore[arg-type]

    monkeypatch.setattr(RunFolder, "on_epoch_end", lose)
    arguments = [*TINY, "--epochs=3", f"--output-dir={run}", f"--save={tmp_path / 'w'}"]
    assert main(arguments) == 1
    assert f"{run} {LOST}; the run continues in a new folder of that name" in caplog.text
    assert f"--output-dir: {run} {LOST}; files written before that are missing from it" in (
        capsys.readouterr().err
    )
    assert len((run / "history.csv").read_text().splitlines()) == 4
    assert (run / "checkpoint-00000024").is_dir()
    assert (tmp_path / "w").exists()


def test_another_folder_in_the_place_of_the_lost_one_is_not_written_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def exchange(trainer: object) -> None:
        if run.exists() and not (run / "mine").exists():
            run.rename(tmp_path / "elsewhere")
            run.mkdir()
            (run / "mine").touch()

    trainer = small_trainer(None, Recorder(on_epoch=exchange), RunFolder(run))
    words = f"--output-dir: {run} has been replaced by another folder during the run"
    with pytest.raises(AgreedError, match=words):
        small_fit(trainer)
    assert [path.name for path in run.iterdir()] == ["mine"]


def test_a_folder_is_looked_at_before_checkpoints_between_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    seen: list[int] = []

    def lose(trainer: object) -> None:
        if trainer.optimizer.iterations == 1:  # type: ignore[attr-defined]
            run.rmdir()
        if run.exists():
            seen.append(trainer.optimizer.iterations)  # type: ignore[attr-defined]

    folder = RunFolder(run)
    saver = Checkpointer(run, every_steps=3, check=folder.look)
    trainer = small_trainer(None, folder, Recorder(on_step=lose), saver)
    with caplog.at_level(logging.WARNING):
        small_fit(trainer, epochs=1)
    assert seen == [4]
    assert [path.name for path in find_checkpoints(run)] == [
        "checkpoint-00000003",
        "checkpoint-00000004",
    ]
    assert caplog.text.count(LOST) == 1

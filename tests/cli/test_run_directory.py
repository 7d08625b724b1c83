"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import RunFolder, remove_unfinished_files, run_directory
from pydtnn.comm import Serial
from pydtnn.train import main
from pydtnn.utils.errors import AgreedError
from tests.small_run import TINY


@pytest.mark.threads(1, 2)
def test_a_folder_in_which_another_run_is_writing_is_refused(comm, tmp_path):
    config = TrainConfig(output_dir=str(tmp_path / "run"), resume=True)
    words = f"--output-dir: another run is writing in {tmp_path / 'run'}; wait until it ends, or"
    with run_directory(config, comm) as path:
        (path / ".checkpoint-00000003.partial").mkdir(exist_ok=True)
        comm.barrier()
        with pytest.raises(AgreedError, match=words), run_directory(config, comm):
            pass
        assert (path / ".checkpoint-00000003.partial").exists()
        with run_directory(replace(config, evaluate_only=True), comm):  # looks at it meanwhile
            comm.barrier()
    with run_directory(config, comm):
        comm.barrier()


def test_a_name_that_is_too_long_is_a_sentence(tmp_path):
    config = TrainConfig(output_dir=str(tmp_path / ("x" * 300)))
    with (
        pytest.raises(AgreedError, match="^train: --output-dir: cannot write .*: file name too l"),
        run_directory(config, Serial()),
    ):
        pass


KILLED = """
import os, signal, sys
from pydtnn.comm import Serial
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import run_directory
with run_directory(TrainConfig(output_dir=sys.argv[1]), Serial()) as path:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_gives_its_folder_back(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with run_directory(TrainConfig(output_dir=str(tmp_path)), Serial()) as path:
        assert path == tmp_path


def test_what_killed_runs_left_in_a_folder_is_removed_by_the_next_run(tmp_path):
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


def test_a_run_whose_folder_is_lost_fails_with_its_results_written(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"

    def lose(self: RunFolder, trainer: object) -> None:
        if trainer.epoch == 1:  # type: ignore[attr-defined]
            run.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(RunFolder, "on_epoch_end", lose)
    arguments = [*TINY, "--epochs=3", f"--output-dir={run}", f"--save={tmp_path / 'w'}"]
    assert main(arguments) == 1
    assert f"--output-dir: {run} was removed or renamed while the" in capsys.readouterr().err
    assert len((run / "history.csv").read_text().splitlines()) == 4
    assert (run / "checkpoint-00000024").is_dir()
    assert (tmp_path / "w").exists()

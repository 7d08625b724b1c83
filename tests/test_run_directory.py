"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.config import TrainConfig
from pydtnn.errors import AgreedError
from pydtnn.run_directory import run_directory


@pytest.mark.threads(1, 2)
def test_a_folder_in_which_another_run_is_writing_is_refused(
    comm: Communicator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=str(tmp_path / "run"), resume=True)
    words = f"--output-dir: another run is writing in {tmp_path / 'run'}; wait for its end, or"
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
        pytest.raises(AgreedError, match="^--output-dir: cannot write .*: file name too long; ch"),
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
from pydtnn.config import TrainConfig
from pydtnn.run_directory import run_directory
with run_directory(TrainConfig(output_dir=sys.argv[1]), Serial()) as path:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_gives_its_folder_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with run_directory(TrainConfig(output_dir=str(tmp_path)), Serial()) as path:
        assert path == tmp_path

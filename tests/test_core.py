"""The library trains without its tools, and on CPUs without the code for GPUs."""

import re
import subprocess
import sys

import pytest

from tests.ahead import mpiexec
from tests.core import copy_core
from tests.small_run import TINY, TRAIN

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Environment of processes that find the core only."""
    return copy_core(tmp_path_factory.mktemp("core"))


def test_ranks_train(core, tmp_path):
    options = [*TRAIN, *TINY, "--output-dir=run", "--platform=cpu-1gbit"]
    done = mpiexec(2, options, environment=core, directory=tmp_path)
    assert done.returncode == 0, done
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--parallel=auto"], "auto.* requires the tools of pydtnn"),
        (["--trace=trace"], "--trace requires the tools of"),
        (["--survive"], "--survive requires the tools of"),
        (["--virtual-ranks=2", "--platform=cpu-1gbit"], "--virtual-ranks requires the tools of"),
        (["--tensorboard"], "--tensorboard, --mlflow or --wandb requires the tools of pydtnn"),
    ],
)
def test_what_needs_a_tool_is_refused(options, sentence, core, tmp_path):
    command = [sys.executable, *TRAIN, *TINY, *options]
    given = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(command, env=core, check=False, **given)
    assert done.returncode == 1
    assert re.search(sentence, done.stderr)


def test_the_list_of_commands_is_that_of_the_core(core, tmp_path):
    command = [sys.executable, "-m", "pydtnn"]
    given = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(command, env=core, check=True, **given)
    assert "  train " in f"  {done.stdout}".replace("\n", "\n  ")
    assert "oracle" not in done.stdout
    done = subprocess.run([*command, "oracle"], env=core, check=False, **given)
    assert done.returncode == 1
    assert done.stderr == "pydtnn: oracle requires the tools of pydtnn, not installed here\n"

"""``python -m pydtnn`` lists every module that is run."""

import subprocess
import sys
from pathlib import Path

import pytest

import pydtnn
from pydtnn.__main__ import COMMANDS, main

ROOT = Path(pydtnn.__file__).parent


def test_every_command_is_listed() -> None:
    run = 'if __name__ == "__main__":'
    files = {f.relative_to(ROOT) for f in ROOT.rglob("*.py") if run in f.read_text()}
    names = {".".join(f.with_suffix("").parts).removesuffix(".__main__") for f in files}
    monitor = "comm.monitor.process"  # not for users
    assert names - {"__main__", monitor} == {*COMMANDS}


def test_the_list_is_printed() -> None:
    found = subprocess.run([sys.executable, "-m", "pydtnn"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()[2:]] == [*COMMANDS]


@pytest.mark.parametrize(
    ("given", "answer"), [("train", "use python -m pydtnn.train"), ("tran", "did you mean 'train'")]
)
def test_a_command_is_a_module(given: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([given, "--model", "mlp"]) == 1
    assert answer in capsys.readouterr().err

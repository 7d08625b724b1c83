"""Runs of the command line that last a fraction of a second, and programs for the ranks of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pydtnn.train import main

TINY = [
    "--model=mlp",
    '--dataset-options={"samples": 120, "test_samples": 40, "shape": [12, 12, 1], "classes": 4}',
    "--global-batch-size=16",
    "--epochs=2",
    "--threads=1",
]
"""Eight steps an epoch, the last of half a batch."""

TRAIN = ["-m", "pydtnn.train"]


@dataclass(frozen=True)
class Failure:
    """How a command has failed: its exit status, what it printed, and the sentence."""

    status: int
    printed: str
    sentence: str


Fail = Callable[..., Failure]


@pytest.fixture
def fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Fail:
    """`fail("--lr=-1")` runs a command that must fail in one line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Failure:
        capsys.readouterr()
        status = main(arguments)
        printed, told = capsys.readouterr()
        assert status != 0
        return Failure(status, printed, only_line(told))

    return run


def only_line(told: str) -> str:
    """The only line on the standard error, which is no traceback."""
    lines = told.splitlines()
    assert len(lines) == 1, told
    assert "Traceback" not in told
    return lines[0]


def is_gone(process: int) -> bool:
    """Whether a process is no more, or a zombie, for which nobody has waited yet."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"

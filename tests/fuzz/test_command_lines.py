"""Random command lines: refused in one sentence before any work, or carried out."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from pydtnn.train import main
from tests import launch
from tests.fuzz.command_lines import Line, random_line

LONGEST = 300
"""Seconds after which a command line that ends in one is taken to hang."""


@dataclass(frozen=True)
class Ended:
    """What a command line left."""

    status: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise in what lasts longer."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it still runs after {seconds} s")

    former = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def run_here(line: Line) -> Ended:
    stdout, stderr = io.StringIO(), io.StringIO()
    with limited(LONGEST), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = main(line.arguments)
    return Ended(status, stdout.getvalue(), stderr.getvalue())


def run_on(ranks: int, line: Line, folder: Path) -> Ended:
    command = ["-m", "pydtnn.train", "--straggler-factor=0", *line.arguments]
    if ranks == 1:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=LONGEST
        )
        return Ended(done.returncode, done.stdout, done.stderr)
    finished = launch.run(ranks, command, directory=folder, timeout=LONGEST)
    return Ended(finished.returncode, finished.stdout, finished.stderr)


def judge(line: Line, ended: Ended, folder: Path) -> None:
    """What holds of every command line."""
    told = f"{line}\n{ended.stdout}\n{ended.stderr}"
    histories = [json.loads(path.read_text()) for path in folder.rglob("history.json")]
    trained = any(histories) or "\nepoch 1/" in ended.stdout
    assert "Traceback" not in ended.stderr, told
    assert "PYDTNN_TRACEBACK" not in ended.stderr, told
    if ended.status == 0:
        assert not line.bad, told
        assert not ended.stderr, told
        assert len(histories) == 1, told
        assert 1 <= len(histories[0]) <= 2, told
        return
    assert len(ended.stderr.splitlines()) == 1, told
    assert "not finite" in ended.stderr or not trained, told
    assert "not finite" in ended.stderr or not [*folder.iterdir()], told


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.fuzz("damage")
def test_a_command_line_trains_or_is_refused_in_one_sentence(cases, folder):
    for case in cases:
        line = random_line(case.rng)
        case.compare(judge, line, run_here(line), folder)
        empty(folder)


@pytest.mark.fuzz("damage")
@pytest.mark.skipif(bool(launch.why_not()), reason=launch.why_not())
def test_so_it_does_in_processes_of_its_own(cases, folder):
    for case in cases:
        line, ranks = random_line(case.rng), int(case.rng.integers(1, 3))
        if any("\0" in argument for argument in line.arguments):
            continue  # what no process can be given
        case.compare(judge, line, run_on(ranks, line, folder), folder)
        empty(folder)

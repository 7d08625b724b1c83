"""The table of a search on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

from pydtnn.tools.search import make_space
from pydtnn.tools.search.lines import seconds_left, use_of
from pydtnn.tools.search.live import Region, rows_of
from pydtnn.tools.search.study import GROUP, SharedStudy
from tests.launch import MPICH, OPENMPI, ROOT, is_openmpi, mpiexec, why_not

optuna = pytest.importorskip("optuna")

SPACE = {"space": {"x": {"low": 0.0, "high": 1.0}}, "trials": 6, "fixed": {"epochs": 4}}
DIMENSIONS = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}
FUNCTION = """
import time


def f(trial):
    for epoch in range(1, 5):
        time.sleep(0.2)
        trial.report(trial.values["x"] * epoch, epoch)
    return trial.values["x"]
"""


def trial(
    state: str, x: float, *, begin: float, end: float | None, rank: int = 0, job: int = 7
) -> object:
    """Return a trial without its number."""
    span = {"host": "a", "job": job, "ranks": [rank], "begin": begin, "end": end}
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        value=x if state == "COMPLETE" else None,
        params={"x": x},
        distributions=DIMENSIONS,
        intermediate_values={1: x, 2: x / 2},
        user_attrs={GROUP: [span]},
    )


@pytest.fixture
def study() -> optuna.Study:
    """A study of job 7, whose two ranks have trained from 100 to 130 s."""
    made = optuna.create_study(direction="maximize")
    made.add_trial(trial("COMPLETE", 0.25, begin=100, end=110))
    made.add_trial(trial("PRUNED", 0.125, begin=101, end=105, rank=1))
    made.add_trial(trial("FAIL", 0.5, begin=105, end=115, rank=1))
    for number, begin in enumerate((110, 128)):
        one = trial("RUNNING", 0.75, begin=begin, end=None, rank=number)
        made._storage.create_new_trial(made._study_id, one)
    return made


def test_the_table_shows_counts_the_best_trial_and_those_in_progress(study):
    rows = rows_of(make_space(**SPACE), study.get_trials(), 7, 130.0)
    assert rows == [
        "3/6  1 complete, 1 pruned, 1 failed",
        "ranks used 76.7%  about 7.0 s left",
        "best  trial 0  val_accuracy 0.25  x 0.25",
        "trial  ranks  epoch  value    time",
        "    3      0    2/4  0.375  20.0 s",
        "    4      1    2/4  0.375   2.0 s",
    ]
    assert len(rows_of(make_space(**SPACE), study.get_trials(), 8, 130.0)) == 3


def test_the_time_left_is_that_of_all_trials_on_the_groups_that_train(study):
    """Trials took 8 s in the mean; the two in progress have trained for 2 and 6 s."""
    study._storage.set_trial_user_attr(3, GROUP, [{"begin": 124, "end": None}])
    trials = study.get_trials()
    assert seconds_left(make_space(**SPACE), trials, 130.0) == (2 + 6 + 8) / 2
    assert seconds_left(make_space(**SPACE | {"trials": 5}), trials, 130.0) == 6
    assert seconds_left(make_space(**SPACE), [], 0.0) is None


def test_the_use_of_the_ranks_does_not_count_the_time_between_jobs(study):
    study.add_trial(trial("COMPLETE", 0.5, begin=900, end=905, job=8))
    share, seconds = use_of(study.get_trials())
    assert share == (10 + 4 + 10 + 5) / (15 * 2 + 5)
    assert seconds == 20


def test_lines_that_a_narrower_terminal_wraps_are_erased(monkeypatch):
    file = io.StringIO()
    region = Region(file)
    monkeypatch.setenv("COLUMNS", "80")
    region.show([], ["a" * 90, "b"])
    assert file.getvalue() == "a" * 79 + "\nb\n"
    monkeypatch.setenv("COLUMNS", "40")
    region.show(["remains" * 7], ["c" * 50])
    assert file.getvalue().endswith("\r\x1b[3A\x1b[J" + "remains" * 7 + "\n" + "c" * 39 + "\n")


def test_values_of_a_journal_are_not_executed_by_the_terminal():
    file = io.StringIO()
    Region(file).show(["best \x1b]0;title\x07"], ["\x9b2J"])
    assert file.getvalue() == "best \\x1b]0;title\\x07\n\\x9b2J\n"


class Terminal:
    """A shell command in the foreground of a terminal of 24 lines of 40 characters."""

    def __init__(self, command: str, folder: Path) -> None:
        settings = OPENMPI if is_openmpi() else MPICH
        environment = {**settings, **os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        (folder / "f.py").write_text(FUNCTION)
        (folder / "space.yaml").write_text(json.dumps({**SPACE, "function": "f.py:f"}))
        self.shown = ""
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
            os.execve("/bin/sh", ["sh", "-c", command], environment)

    def read(self, until: str = "") -> None:
        """Read until the output has a text, or to its end."""
        with contextlib.suppress(OSError):  # the command has ended
            while not (until and until in self.shown):
                part = os.read(self.file, 4096)
                if not part:
                    break
                self.shown += part.decode()
        assert until in self.shown, self.shown

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


PYTHON = f"{sys.executable} -m pydtnn search space.yaml"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_shows_the_table_and_keeps_a_line_for_each_trial(ranks, tmp_path):
    if ranks > 1 and why_not():
        pytest.skip(why_not())
    command = PYTHON if ranks == 1 else f"{mpiexec()} -n {ranks} {PYTHON}"
    terminal = Terminal(command, tmp_path)
    terminal.read()
    assert terminal.wait() == 0
    _, *tables = re.split("\r\x1b\\[\\d+A\x1b\\[J", terminal.shown)
    row = re.compile(r"^ +\d +[01] +\d/4 .* \d\.\d s\r$", re.MULTILINE)
    assert max(len(row.findall(table)) for table in tables) == ranks
    assert all(len(line) < 40 for line in tables[0].split("\r\n")[-4:])
    assert "ranks used" in tables[0]
    assert "ranks used" not in tables[-1]
    lines = re.findall(r"(\d)/6  trial \d  x", terminal.shown)
    assert lines == [*"123456"]
    assert "page: runs/space/search.html\r\nbest: val_accuracy" in tables[-1]


@pytest.mark.parametrize("end", ["closed", "Ctrl-C"])
def test_a_search_ends_with_ctrl_c_and_goes_on_after_its_terminal_was_closed(end, tmp_path):
    terminal = Terminal(f"trap '' HUP; {PYTHON} --export=best.yaml", tmp_path)
    terminal.read("ranks used")
    if end == "Ctrl-C":
        os.write(terminal.file, b"\x03")
        terminal.read()
        assert terminal.wait() == -signal.SIGINT
        assert "interrupted (Ctrl-C)" in terminal.shown
        return
    os.close(terminal.file)
    terminal.wait()
    study = SharedStudy(tmp_path / "runs/space", make_space(**SPACE, function="f.py:f")).study
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 6
    assert "x: " in (tmp_path / "best.yaml").read_text()

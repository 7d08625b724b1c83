"""Searches that go on in the same job when ranks are killed, or have errors of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.search import make_space
from pydtnn.tools.search.study import GROUP, REASON, SharedStudy
from tests.each import each
from tests.launch import Program, is_openmpi, why_not
from tests.ranks import rank_processes, wait_for
from tests.tools.search.test_search import BROKEN, FIXED

pytest.importorskip("optuna")
pytestmark = pytest.mark.skipif(
    bool(why_not()) or not is_openmpi(), reason=why_not() or "MPICH ends all ranks if one fails"
)

RANGE = {"lr": {"low": 1e-3, "high": 0.1, "log": True}}


def started(folder: Path, space: dict[str, Any], ranks: int, *options: str) -> Program:
    (folder / "space.yaml").write_text(json.dumps(space))
    command = ["-m", "pydtnn", "search", "space.yaml", *options]
    return Program(ranks, command, directory=folder, options=["--with-ft", "ulfm"])


def trials(folder: Path, space: dict[str, Any]) -> list[Any]:
    return list(SharedStudy(folder / "runs" / "space", make_space(**space)).study.trials)


@each("victims", [(0,), (2, 3), (1, 2)])
def test_a_search_goes_on_without_ranks_that_are_killed(victims, tmp_path):
    fixed = {**FIXED, "epochs": 10}
    space = {"space": RANGE, "fixed": fixed, "trials": 8, "sampler": "random"}
    with started(tmp_path, space, 4, "--ranks-per-trial=2") as program:
        wait_for(lambda: "/8  trial" in program.finished().stdout)
        for rank in victims:
            os.kill(rank_processes(program)[rank], signal.SIGKILL)
        assert program.wait(), program.finished()
        finished = program.finished()
    assert finished.returncode == 0, finished
    found = trials(tmp_path, space)
    assert [one.number for one in found] == [*range(8)]
    assert {one.state.name for one in found} == {"COMPLETE"}
    last = {tuple(one.user_attrs[GROUP][-1]["ranks"]) for one in found}
    assert any(len(ranks) == 1 for ranks in last) or victims == (2, 3)
    assert "best: val_accuracy" in finished.stdout


def test_an_error_of_one_rank_ends_the_trial_alone(tmp_path):
    (tmp_path / "f.py").write_text(BROKEN)
    space = {"space": {"x": [1, 2, 3]}, "sampler": "grid", "function": "f.py:f"}
    with started(tmp_path, space, 2, "--ranks-per-trial=2") as program:
        assert program.wait(), program.finished()
        assert program.finished().returncode == 0, program.finished()
    found = trials(tmp_path, space)
    assert [one.state.name for one in found] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert found[1].user_attrs[REASON].startswith("rank 1: RuntimeError: one rank alone")

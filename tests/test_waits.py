"""A rank that does not go on: named in one table, wherever it stops, and all ranks end."""

from __future__ import annotations

import os
import re
import time
from itertools import product
from pathlib import Path

import pytest

from pydtnn.comm.monitor.monitor import STATUS
from tests.ahead import mpiexec
from tests.launch import ROOT, Finished, Program, why_not
from tests.ranks import rank_processes, wait_for
from tests.small_run import TINY, TRAIN, processes_in

PROGRAM = """
import os, signal, sys, time

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
count = 0

def strike(owner, name):
    original = getattr(owner, name)
    def struck(*args, **keywords):
        global count
        count += 1
        if count == int(os.environ["CALL"]):
            exec(os.environ["ACT"])
        return original(*args, **keywords)
    setattr(owner, name, struck)

from pydtnn import train
from pydtnn.comm import mpi
from pydtnn.data.loader import Loader
from pydtnn.layers import Linear

if RANK == int(os.environ["LATE"]):
    owner, name = {
        "forward": (Linear, "forward"),
        "message": (mpi._MpiRequest, "_complete"),
        "loader": (Loader, "_make"),
    }[os.environ["WHERE"]]
    strike(owner, name)
sys.exit(train.main())
"""

STOP = "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1)"  # the thread may run on for a moment
SLEEP = "time.sleep(1000)"

PLACES = {
    "forward": "in forward of fc",
    "message": "in iallreduce",
    "loader": "loader 0: prepares a batch",
}


def late(
    where: str, act: str, rank: int, ranks: int, timeout: float, folder: Path, call: int = 7
) -> tuple[Finished, float]:
    """Run a program in which a rank does not go on; return what it left, and its duration."""
    environment = {"PYTHONPATH": str(ROOT), "WHERE": where, "ACT": act}
    environment |= {"LATE": str(rank), "CALL": str(call)}
    options = [f"--timeout={timeout:g}", "--output-dir=run", "--epochs=9"]
    arguments = ["-c", PROGRAM, *TINY, "--tuning=fixed", *options]  # no passes before training
    begin = time.monotonic()
    finished = mpiexec(ranks, arguments, environment=environment, directory=folder, timeout=90)
    seconds = time.monotonic() - begin
    wait_for(lambda: not processes_in(folder), 5)
    return finished, seconds


def check_table(where: str, act: str, rank: int, ranks: int, told: str) -> None:
    """Check that there is one table, which names the rank and where it is."""
    lines = told.splitlines()
    (first,) = (line for line in lines if line.startswith("no progress for "))
    assert re.search(rf": rank {rank}: .* since \d+ s; rank", first), told
    assert PLACES[where] in first, told
    if act == STOP:
        assert "stopped by a signal" in first, told
    heading = lines.index(next(line for line in lines if line.startswith("rank ")))
    end = next(n for n, line in enumerate(lines) if n > heading and "stack of" in line)
    shown = {row.split("  ")[0] for row in lines[heading + 1 : end]}
    assert str(rank) in shown, told
    assert f"stack of rank {(rank + 1) % ranks}:\n  MainThread: " in told


@pytest.mark.ahead(
    call=lambda where, act, rank, folder: late(where, act, rank, 3, 2, folder),
)
@pytest.mark.parametrize(
    ("where", "act", "rank"),
    [("forward", STOP, 0), pytest.param("loader", SLEEP, 2, marks=pytest.mark.long)],
    ids=["stopped in forward", "in the loader"],
)
def test_a_rank_that_does_not_go_on_is_named_and_all_end(
    where: str, act: str, rank: int, ahead: tuple[Finished, float]
) -> None:
    finished, _ = ahead
    assert finished.returncode == STATUS, finished
    check_table(where, act, rank, 3, finished.stderr)


CASES = [*product(PLACES, range(4), (7, 40))][:20]
FEW = ("forward", 1, 40), ("loader", 0, 7)
"""Tested without `--matrix`, too."""


@pytest.mark.long
@pytest.mark.ahead(
    call=lambda where, rank, call, folder: late(where, STOP, rank, 4, 10, folder, call)
)
@pytest.mark.parametrize(
    ("where", "rank", "call"),
    [pytest.param(*case, marks=[pytest.mark.matrix] * (case not in FEW)) for case in CASES],
)
def test_each_rank_is_named_wherever_it_is_stopped(
    where: str, rank: int, call: int, ahead: tuple[Finished, float]
) -> None:
    finished, seconds = ahead
    assert finished.returncode == STATUS, finished
    check_table(where, STOP, rank, 4, finished.stderr)
    assert seconds < 30  # 10 of the wait, the start, and at most 5 for the table and the end


@pytest.mark.long
def test_a_signal_prints_the_table_and_training_goes_on(tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    arguments = [*TRAIN, *TINY, "--epochs=100000", f"--output-dir={tmp_path / 'run'}"]
    with Program(3, arguments, directory=tmp_path) as program:
        wait_for(lambda: "epoch 2/" in program.finished().stdout)
        os.kill(rank_processes(program)[1], 10)
        wait_for(lambda: "stack of rank 2:" in program.finished().stderr)
        epochs = program.finished().stdout.count("\nepoch ")
        wait_for(lambda: program.finished().stdout.count("\nepoch ") > epochs + 1)
        told = program.finished().stderr
        assert told.count("rank  epoch") == 1
        assert "no progress" not in told

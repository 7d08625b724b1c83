"""A rank that does not go on: named in one table, wherever it stops, and all ranks end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from pydtnn.comm.monitor.monitor import TIMEOUT_STATUS
from tests.ahead import mpiexec
from tests.launch import ROOT, Finished, Program, why_not
from tests.ranks import monitor_process, rank_processes, wait_for
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


def late(where: str, act: str, rank: int, call: int, folder: Path, *more: str) -> Finished:
    """Run a program of 3 ranks one of which does not go on; return what it left."""
    environment = {"PYTHONPATH": str(ROOT), "WHERE": where, "ACT": act}
    environment |= {"LATE": str(rank), "CALL": str(call)}
    options = ["--timeout=2", "--output-dir=run", "--epochs=9", *more]
    arguments = ["-c", PROGRAM, *TINY, "--tuning=fixed", *options]  # no passes before training
    finished = mpiexec(3, arguments, environment=environment, directory=folder)
    wait_for(lambda: not processes_in(folder))
    return finished


def check_table(where: str, act: str, rank: int, told: str) -> None:
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
    assert f"stack of rank {(rank + 1) % 3}:\n  MainThread: " in told


@pytest.mark.ahead(
    call=lambda where, act, rank, call, folder: late(where, act, rank, call, folder),
)
@pytest.mark.parametrize(
    ("where", "act", "rank", "call"),
    [
        ("forward", STOP, 0, 7),
        pytest.param("loader", SLEEP, 2, 7, marks=pytest.mark.long),
        pytest.param("message", STOP, 1, 40, marks=pytest.mark.long),
    ],
    ids=["stopped in forward", "in the loader", "in a message"],
)
def test_a_rank_that_does_not_go_on_is_named_and_all_end(where, act, rank, call, ahead):
    assert ahead.returncode == TIMEOUT_STATUS, ahead
    check_table(where, act, rank, ahead.stderr)


def training(folder: Path, *options: str) -> Program:
    """Start a training of 3 ranks that does not end by itself, and wait for its second epoch."""
    if why_not():
        pytest.skip(why_not())
    arguments = [*TRAIN, *TINY, "--epochs=100000", f"--output-dir={folder / 'run'}", *options]
    program = Program(3, arguments, directory=folder)
    wait_for(lambda: "epoch 2/" in program.finished().stdout)
    return program


@pytest.mark.long
def test_training_goes_on_without_the_monitor_until_a_signal_ends_it(tmp_path):
    with training(tmp_path) as program:
        os.kill(monitor_process(program), signal.SIGKILL)
        wait_for(lambda: "warning: the monitor process of " in program.finished().stderr)
        goes_on(program)
        assert program.finished().stderr.count("\n") == 1
        os.kill(rank_processes(program)[1], signal.SIGTERM)
        assert program.wait()
        finished = program.finished()
    assert finished.returncode == 143, finished
    assert "\nrank 1: terminated (SIGTERM)" in finished.stderr
    wait_for(lambda: not processes_in(tmp_path))


def goes_on(program: Program) -> None:
    """Wait for two further epochs."""
    epochs = program.finished().stdout.count("\nepoch ")
    wait_for(lambda: program.finished().stdout.count("\nepoch ") > epochs + 1)


@pytest.mark.long
def test_a_monitor_that_is_stopped_does_not_outlive_the_job(tmp_path):
    with training(tmp_path) as program:
        os.kill(monitor_process(program), signal.SIGSTOP)
        os.kill(rank_processes(program)[2], signal.SIGHUP)  # ends the run at once
        assert program.wait()
        assert program.finished().returncode == 129
        wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.long
def test_a_signal_prints_one_table_and_training_goes_on(tmp_path):
    with training(tmp_path) as program:
        program.signal(signal.SIGUSR1)
        for process in program.descendants():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGUSR1)
        wait_for(lambda: "stack of rank 2:" in program.finished().stderr)
        goes_on(program)
        told = program.finished().stderr
        assert told.count("rank  epoch") == 1
        assert "no progress" not in told

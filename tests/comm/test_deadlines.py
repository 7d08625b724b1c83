"""Waits that last too long, the table on request, and the last step, on one host and on several."""

from __future__ import annotations

import re

import pytest

from pydtnn.comm.monitor.monitor import TIMEOUT_STATUS
from tests.ahead import mpiexec
from tests.launch import Finished

HOSTS = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from pydtnn.comm.monitor.failure import end_all_ranks_on_error
from pydtnn.comm.mpi import MpiCommunicator
comm = MpiCommunicator(MPI, MPI.COMM_WORLD.Dup(), [0, 0, 2, 3])
comm.attendance.supervision = end_all_ranks_on_error(comm).supervision
comm.supervision.limit(2)
time.sleep(0.5)
"""

LATE = """
if comm.rank == {rank}:
    {act}
comm.allreduce(np.ones(3))
"""


def late(rank: int, act: str) -> Finished:
    return mpiexec(4, ["-c", HOSTS + LATE.format(rank=rank, act=act)])


@pytest.mark.ahead(call=late)
@pytest.mark.parametrize(
    ("rank", "act", "words", "others"),
    [
        (2, "os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal", "0-1, 3"),
        pytest.param(3, "time.sleep(1000)", "outside of", "0-2", marks=pytest.mark.long),
    ],
)
def test_a_wait_that_lasts_too_long_ends_all_ranks_in_one_table(ahead, rank, act, words, others):
    assert ahead.returncode == TIMEOUT_STATUS, ahead
    assert ahead.stderr.count("no progress for 2 s (--timeout): ") == 1, ahead.stderr
    first = ahead.stderr.splitlines()[0]
    assert re.search(rf": rank {rank}: .*{words}.*; ranks .* wait in allreduce", first), first
    assert f"\n{others}  " in ahead.stderr


SIGNALLED = """
last_step = comm.supervision.last_step
last_step.start()
for step in range(1000):
    if last := last_step.passed():
        print("last step", step, flush=True)
        raise SystemExit(128 + last.signal)
    if step == 20 and comm.rank == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    comm.allreduce(np.ones(3))
    time.sleep(0.005)
"""


@pytest.mark.ahead(call=lambda: mpiexec(4, ["-c", HOSTS + SIGNALLED]))
def test_ranks_of_several_hosts_end_after_the_same_step(ahead):
    assert ahead.returncode == 143, ahead
    (step,) = {*ahead.stdout.split("\n")} - {""}
    assert 20 < int(step.removeprefix("last step ")) < 1000
    assert ahead.stdout.count(step) == 4

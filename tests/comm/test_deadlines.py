"""Waits that last too long, the table on request, and the last step, on one host and on several."""

from __future__ import annotations

import re

import pytest

from pydtnn.comm import create_communicator
from pydtnn.comm.monitor.monitor import TIMEOUT_STATUS
from tests.ahead import mpiexec
from tests.launch import Finished

START = """
import os, signal, sys, time
import numpy as np
from pydtnn.comm import create_communicator
comm = create_communicator(timeout=2)
time.sleep(0.5)
"""

HOSTS = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from pydtnn.comm.failure import end_all_ranks_on_error
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

STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


def late(start: str, rank: int, act: str) -> Finished:
    return mpiexec(4, ["-c", start + LATE.format(rank=rank, act=act)], timeout=60)


@pytest.mark.ahead(call=late)
@pytest.mark.parametrize(
    ("start", "rank", "act"),
    [
        (HOSTS, 2, STOP),
        pytest.param(START, 3, "time.sleep(1000)", marks=pytest.mark.long),
        pytest.param(START, 1, "comm.split(0).recv(np.ones(3), 2)", marks=pytest.mark.long),
    ],
)
def test_a_wait_that_lasts_too_long_ends_all_ranks_in_one_table(
    ahead: Finished, start: str, rank: int, act: str
) -> None:
    assert ahead.returncode == TIMEOUT_STATUS, ahead
    assert ahead.stderr.count("no progress for 2 s (--timeout): ") == 1, ahead.stderr
    first = ahead.stderr.splitlines()[0]
    words = {2: "stopped by a signal", 3: "outside of"}.get(rank, "")
    assert words in first
    if words:
        assert re.search(rf": rank {rank}: .*; ranks .* wait in allreduce", first), ahead.stderr
        others = "0-1, 3" if rank == 2 else "0-2"
        assert f"\n{others}  " in ahead.stderr


ASKED = """
comm.barrier()
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(5)
comm.barrier()
"""


@pytest.mark.ahead(call=lambda: mpiexec(4, ["-c", HOSTS + ASKED], timeout=60))
def test_a_table_on_request_does_not_end_the_run(ahead: Finished) -> None:
    assert ahead.returncode == 0, ahead
    assert ahead.stderr.count("rank  ") == 1, ahead.stderr
    for rank in range(4):
        assert f"stack of rank {rank}:\n  MainThread: <string>:" in ahead.stderr


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


@pytest.mark.ahead(call=lambda: mpiexec(4, ["-c", HOSTS + SIGNALLED], timeout=60))
def test_ranks_of_several_hosts_end_after_the_same_step(ahead: Finished) -> None:
    assert ahead.returncode == 143, ahead
    (step,) = {*ahead.stdout.split("\n")} - {""}
    assert 20 < int(step.removeprefix("last step ")) < 1000
    assert ahead.stdout.count(step) == 4


def test_a_negative_deadline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeout must be at least 0 s, got -1"):
        create_communicator("serial", timeout=-1)


FROZEN = """
import pathlib, subprocess
if comm.rank == 3:
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        process, parent = path.parent.name, f"PPid:\\t{os.getpid()}\\n"
        status = path.with_name("status").read_text()
        if b"monitor/process.py" in path.read_bytes() and parent in status:
            command = f"sleep 12; kill -CONT {process}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
            os.kill(int(process), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
comm.allreduce(np.ones(3))
"""


@pytest.mark.long
@pytest.mark.ahead(call=lambda: mpiexec(4, ["-c", HOSTS + FROZEN], timeout=60))
def test_a_host_that_does_not_answer_is_named(ahead: Finished) -> None:
    assert ahead.returncode == TIMEOUT_STATUS, ahead
    assert ": rank 3: cannot be asked: its host does not answer" in ahead.stderr

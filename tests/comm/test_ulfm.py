"""Ranks of Open MPI that may fail: errors still end all of them, and none waits without end."""

import sys

import pytest

from benchmarks.comm import cluster_launch
from tests.each import each
from tests.launch import Program, is_openmpi, why_not

pytestmark = pytest.mark.skipif(
    bool(why_not()) or not is_openmpi(), reason=why_not() or "MPICH ends all ranks if one fails"
)

ERROR = """
import numpy as np
from pydtnn.comm import create_communicator
comm = create_communicator()
comm.supervision.survive({survives})
if comm.rank == {rank}:
    raise ValueError("an error of its own")
while True:
    comm.allreduce(np.zeros(4))
"""

FAILS_AT = """
import atexit, os, signal, sys
moment, failing = sys.argv[1], os.environ["OMPI_COMM_WORLD_RANK"] in {failing}
def fail():
    if failing:
        os.kill(os.getpid(), signal.{number})
if moment == "after MPI": atexit.register(fail)
import numpy as np
from pydtnn.comm import create_communicator
from pydtnn.comm.monitor import failure
from pydtnn.comm.schedules.rule import without_rule
from pydtnn.utils.errors import RankFailure
connect, wait = failure._connect, failure._wait
if moment == "connect": failure._connect = lambda *words: (fail(), connect(*words))[1]
if moment == "watched": failure._wait = lambda *words: (wait(*words), fail())
if moment == "start": fail()
comm = create_communicator(timeout=2 if "{number}" == "SIGSTOP" else 300)
comm.supervision.survive(True)
if moment == "end": atexit.register(fail)
try:
    if moment == "call": fail()
    comm.allreduce(np.zeros(4))
except RankFailure:
    comm = without_rule(comm).shrink()
    comm.allreduce(np.zeros(4))
print(comm.size, flush=True)
failure.leave(0)
"""
ENDS_AFTER_START = {"connect": "2", "watched": "2", "call": "2", "end": "3", "after MPI": "3"}
"""The number of ranks that the last of them know, by the moment at which one of 3 fails."""


@each("number", ["SIGKILL", "SIGSTOP"])
@each("moment", ENDS_AFTER_START)
def test_a_rank_that_is_killed_or_stopped_at_any_moment_is_left_behind(moment, number):
    code = FAILS_AT.format(failing="'1'", number=number)
    with Program(3, ["-c", code, moment], options=["--with-ft", "ulfm"]) as program:
        assert program.wait(), program.finished()
        assert not program.descendants()
        finished = program.finished()
    assert finished.returncode == 0, finished
    assert finished.stdout.split()[:2] == 2 * [ENDS_AFTER_START[moment]]
    assert ("no progress for 2 s (--timeout): " in finished.stderr) == (number == "SIGSTOP")


@each(
    ("number", "words"),
    [
        ("SIGSTOP", "no progress for 2 s (--timeout): rank 1 is stopped; killed"),
        ("SIGKILL", "failed before MPI had started, which no rank survives"),
    ],
)
def test_a_rank_that_fails_before_mpi_has_started_ends_all(number, words):
    code = FAILS_AT.format(failing="'1'", number=number)
    with Program(3, ["-c", code, "start"], options=["--with-ft", "ulfm"]) as program:
        assert program.wait()
        finished = program.finished()
    assert finished.returncode == 34
    assert words in finished.stderr


@pytest.mark.long
@pytest.mark.skipif(bool(cluster_launch.why_not()), reason=cluster_launch.why_not())
@each(("moment", "number"), [("start", "SIGKILL"), ("connect", "SIGSTOP")])
def test_a_host_that_is_lost_while_ranks_start_ends_the_others(moment, number):
    code = FAILS_AT.format(failing="'23'", number=number)
    with cluster_launch.Cluster(2, 2, "1gbit") as cluster:
        command = ["--with-ft", "ulfm", sys.executable, "-c", code, moment]
        finished = cluster.run(command, capture_output=True, timeout=200)
    assert finished.returncode != 0
    assert "(--timeout): not all ranks have started; start again" in finished.stderr


@each("survives", [False, True])
@each("rank", [0, 2])
def test_an_error_of_one_rank_ends_all(survives, rank):
    code = ERROR.format(survives=survives, rank=rank)
    with Program(3, ["-c", code], options=["--with-ft", "ulfm"]) as program:
        assert program.wait()
        finished = program.finished()
    assert finished.returncode != 0
    assert finished.stderr.count(f"rank {rank}: an error of its own") == 1

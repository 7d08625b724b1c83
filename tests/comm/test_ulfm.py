"""Ranks of Open MPI that may fail: errors still end all of them."""

from __future__ import annotations

import pytest

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

KILLED = """
import os, signal, time
from pydtnn.comm import create_communicator
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
create_communicator()
"""


@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_one_rank_ends_all(survives: bool, rank: int) -> None:
    code = ERROR.format(survives=survives, rank=rank)
    with Program(3, ["-c", code], options=["--with-ft", "ulfm"]) as program:
        assert program.wait(200)
        finished = program.finished()
    assert finished.returncode != 0
    assert finished.stderr.count(f"rank {rank}: an error of its own") == 1


def test_a_rank_that_is_killed_before_mpi_has_started_ends_all() -> None:
    with Program(3, ["-c", KILLED], options=["--with-ft", "ulfm"]) as program:
        assert program.wait(200)
        finished = program.finished()
    assert finished.returncode == 15
    assert finished.stderr.count("failed before MPI had started, which no rank survives") == 1

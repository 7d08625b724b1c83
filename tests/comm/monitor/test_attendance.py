"""A rank that waits for one whose program has ended ends all; ranks may leave one by one."""

import pytest

from tests.ahead import mpiexec

START = """
import sys, time
import numpy as np
from pydtnn.comm import create_communicator
comm = create_communicator()
"""
ONE_AFTER_THE_OTHER = """
group = comm.split(comm.rank == 2)
if comm.rank == 2: sys.exit(0)
time.sleep(3)
group.allreduce(np.ones(3))
if comm.rank == 0:
    group.send(np.ones(3), 1)
    time.sleep(3)
else:
    group.recv(np.ones(3), 0)
"""
WAITS_LONG = """
if comm.rank == 1: sys.exit(0)
if comm.rank == 2: time.sleep(4)
x = np.ones(3)
comm.send(x, 0) if comm.rank == 2 else comm.recv(x, 2)
"""


def left(leaves, call, ranks):
    body = f"if comm.rank == 1: {leaves}\nelse: {call}"
    return mpiexec(ranks, ["-c", START + body])


@pytest.mark.ahead(call=left)
@pytest.mark.parametrize(
    ("leaves", "call", "ranks"),
    [
        ("sys.exit(0)", "comm.split(0).gather_object(5)", 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("sys.exit(3)", "comm.allreduce(np.ones(5))", 2),
                ("ENDED = True", "comm.iallreduce(np.ones(5)).wait()", 3),
                ("sys.exit(0)", "comm.recv(np.ones(5), 1)", 3),
            )
        ),
    ],
)
def test_a_rank_that_waits_for_one_that_has_left_ends_all(ahead, leaves, call, ranks):
    assert ahead.returncode != 0
    (told,) = [line for line in ahead.stderr.splitlines() if "rank " in line]
    assert "for rank 1, whose program has ended; all ranks must make the same calls" in told


@pytest.mark.measure
@pytest.mark.ahead(call=lambda body: mpiexec(3, ["-c", START + body]))
@pytest.mark.parametrize("body", [ONE_AFTER_THE_OTHER, WAITS_LONG], ids=["left", "waits long"])
def test_ranks_may_leave_one_after_the_other(ahead, body):
    """Those that still work need no rank that has left, and may wait long for one that has not."""
    assert (ahead.returncode, ahead.stderr) == (0, "")

"""A rank that waits for one whose program has ended ends all; ranks may leave one by one."""

from types import SimpleNamespace
from typing import Any

import pytest

from pydtnn.comm.attendance import LATE_S, Attendance, Wait
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.supervision import Supervision
from tests.ahead import mpiexec
from tests.each import each

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
    return mpiexec(ranks, ["-c", START + body], timeout=60)


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
                ("sys.exit(0)", "comm.recv(np.ones(5), None)", 2),
            )
        ),
    ],
)
def test_a_rank_that_waits_for_one_that_has_left_ends_all(ahead, leaves, call, ranks):
    assert ahead.returncode != 0
    (told,) = [line for line in ahead.stderr.splitlines() if "rank " in line]
    assert "for rank 1, whose program has ended; all ranks must make the same calls" in told


class Rank:
    """Rank 0 of three without MPI, and how it has ended the run."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []
        slot = Slot(memoryview(bytearray(SLOT)))
        slot.clear(0, 0.0)
        self.supervision = Supervision([slot], alone=True)
        self.supervision.connect(lambda *end: self.ends.append(end), lambda number: None)
        self.attendance = Attendance()
        mpi, comm = SimpleNamespace(Is_finalized=lambda: True), SimpleNamespace(rank=0)
        self.attendance.watch(mpi, comm, self.supervision)

    def wait(self, wait: Wait, seconds: float, **calls: int) -> list[Any]:
        """Wait after rank 1 has left with these calls; return how the run has ended."""
        self.supervision._obey("exited", [1, calls])
        self.attendance.enter(wait)
        for passed in (0.5, seconds, seconds):
            self.supervision._look(passed)
        self.attendance.exit()
        self.attendance.close()
        return self.ends


ALL = 0, 1, 2


@each(
    ("wait", "seconds", "calls", "ends"),
    [
        (Wait("all", ALL, "barrier", 3), 0.5, {"all": 2}, True),
        (Wait("all", ALL, "barrier", 3), 9.0, {"all": 3}, False),  # it has made that call
        (Wait("all/1", (0, 2), "barrier", 1), 9.0, {"all": 2}, False),  # it is no member
        (Wait("all", ALL, "recv", 0, 1), LATE_S, {}, True),
        (Wait("all", ALL, "recv", 0, 1), LATE_S / 4, {}, False),  # a message may be on its way
        (Wait("all", ALL, "recv", 0, 2), 9.0, {}, False),
        (Wait("all", ALL, "recv", 0), 9.0, {}, False),  # of any rank
        (Wait("all/1", (0, 1), "recv", 0), 9.0, {}, True),
    ],
)
def test_a_wait_ends_the_run_if_a_rank_that_it_needs_has_left(wait, seconds, calls, ends):
    told = Rank().wait(wait, seconds, **calls)
    assert len(told) == ends
    if ends:
        text = f"rank 0: waits in {wait.what} for rank 1, whose program has ended; all ranks must"
        assert told[0][0] == 1
        assert told[0][1].startswith(text)


@pytest.mark.measure
@pytest.mark.ahead(call=lambda body: mpiexec(3, ["-c", START + body], timeout=60))
@pytest.mark.parametrize("body", [ONE_AFTER_THE_OTHER, WAITS_LONG], ids=["left", "waits long"])
def test_ranks_may_leave_one_after_the_other(ahead, body):
    """Those that still work need no rank that has left, and may wait long for one that has not."""
    assert (ahead.returncode, ahead.stderr) == (0, "")

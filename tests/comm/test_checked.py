"""A communicator that compares what ranks call, before they do it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.utils.errors import AgreedError
from tests.checked import Checked
from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


@pytest.mark.threads(1, 3, through=Checked)
@pytest.mark.mpi(2)
class TestChecked(CommunicatorContract):
    pass


Call = Callable[[Communicator, int], object]

DIFFERENT: list[tuple[Call, str, str]] = [
    (
        lambda comm, odd: comm.iallreduce(np.ones(5 + odd)).wait(),
        "iallreduce sum of 6 float64",
        "iallreduce sum of 5 float64",
    ),
    (
        lambda comm, odd: comm.allreduce(np.ones(5, ["f4", "i4"][odd]), ["sum", "max"][odd]),
        "allreduce max of 5 int32",
        "allreduce sum of 5 float32",
    ),
    (
        lambda comm, odd: comm.broadcast(np.ones(5), odd),
        "broadcast of 5 float64 from rank 1",
        "broadcast of 5 float64 from rank 0",
    ),
    (
        lambda comm, odd: comm.allreduce(np.ones(5)) if odd else comm.iallreduce(np.ones(5)).wait(),
        "allreduce sum of 5 float64",
        "iallreduce sum of 5 float64",
    ),
    (  # what comes later
        lambda comm, odd: [
            r.wait() for r in [comm.iallreduce(np.ones(n)) for n in (5, 4 + odd, 3)][::-1]
        ],
        "iallreduce sum of 5 float64",
        "iallreduce sum of 4 float64",
    ),
]


@pytest.mark.threads(2, 3)
@pytest.mark.mpi(2, checked=False)
@each("through", [lambda comm: comm, lambda comm: Scheduled(comm, "ring")])
@each(("call", "odd", "usual"), DIFFERENT)
def test_calls_that_differ_are_refused_on_all_ranks(comm, through, call, odd, usual):
    checked = Checked(through(comm.split(0)))
    with pytest.raises(AgreedError, match=f"^rank 1 calls {odd}.* where rank 0 calls {usual}"):
        call(checked, int(comm.rank == 1))


@pytest.mark.threads(4)
def test_the_ranks_that_differ_from_most_are_named(comm):
    with pytest.raises(AgreedError, match=r"^rank 0 calls allreduce sum of 1 "):
        Checked(comm).allreduce(np.ones(2 if comm.rank else 1))


@pytest.mark.threads(2)
@pytest.mark.mpi(2, checked=False)
def test_a_message_may_come_before_a_call_that_does_not_wait(comm):
    """On rank 1 the call comes after a message that rank 0 sends after its call."""
    checked, x, y = Checked(comm), np.ones(3), np.zeros(2)
    if comm.rank == 0:
        request = checked.iallreduce(x)
        checked.send(y + 7, 1)
    else:
        checked.recv(y, 0)
        request = checked.iallreduce(x)
        assert y.tolist() == [7, 7]
    request.wait()
    assert x.tolist() == [2, 2, 2]
    z = np.zeros(1)
    request = checked.iallreduce(x)
    checked.recv(z, 1) if comm.rank == 0 else checked.send(z, 0)
    request.wait()
    assert x.tolist() == [4, 4, 4]

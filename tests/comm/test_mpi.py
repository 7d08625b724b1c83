"""The communicator over MPI keeps the contract in worlds of 1 to 4 ranks."""

import weakref

import numpy as np
import pytest

from tests.comm.communicator_contract import CommunicatorContract
from tests.each import each


@pytest.mark.mpi(1, 3, checked=False)
class TestMpi(CommunicatorContract):
    pass


@pytest.mark.mpi(2, checked=False)
class TestMpiAsleep(CommunicatorContract):
    """Ranks that sleep while they wait."""

    @pytest.fixture(autouse=True)
    def asleep(self, comm, monkeypatch):
        monkeypatch.setattr(comm, "_sleeps", True)


@pytest.mark.mpi(2, checked=False)
def test_elements_that_the_library_cannot_reduce_are_refused_in_a_sentence(comm, monkeypatch):
    # Every library at hand can reduce float16, so it is made to try what no library can.
    monkeypatch.setitem(comm._ops, "sum", comm._mpi.BAND)
    x, counts = np.ones(comm.size), [1] * comm.size
    for call in (
        lambda: comm.allreduce(x),
        lambda: comm.iallreduce(x),
        lambda: comm.reduce_scatter(x, counts, np.empty(1)),
    ):
        with pytest.raises(TypeError, match=r"^mpi: (MPICH|Open MPI) .* cannot reduce .* float64;"):
            call()


@pytest.mark.long
@pytest.mark.mpi(2, checked=False)
@pytest.mark.parametrize("end", ["freed", "dropped in a cycle", "a group of a group"])
def test_there_may_be_more_groups_one_after_the_other_than_mpi_can_hold(comm, end):
    """MPICH holds some 2,000 at a time."""
    for _ in range(2500):
        group = comm.split(0)
        if end == "freed":
            group.free()
        elif end == "dropped in a cycle":
            group.itself = group
        elif end == "a group of a group":
            group = group.split(0)
    comm.barrier()


@pytest.mark.mpi(2, checked=False)
def test_a_group_that_one_rank_still_has_is_not_freed(comm):
    kept = []
    for _ in range(5):
        group = comm.split(0)
        if comm.rank == 1:
            kept.append(group)
    raw = [group._comm for group in kept]
    del group
    comm.split(0)
    assert all(raw)  # false once it is freed


@pytest.mark.mpi(2, checked=False)
def test_a_request_keeps_its_group(comm):
    x = np.ones(3)
    request = comm.split(0).iallreduce(x)
    for _ in range(3):
        comm.split(0)
    request.wait()
    assert x.tolist() == [2.0] * 3


@pytest.mark.mpi(2, checked=False)
@each("what", ["iallreduce", "message"])
def test_a_request_keeps_its_array_until_it_is_complete(comm, what):
    x = np.full(1000, comm.rank + 1.0)
    alive = weakref.ref(x)
    comm.barrier()
    if what == "iallreduce":
        request = comm.iallreduce(x)
    else:
        request = comm.irecv(x, 1) if comm.rank == 0 else comm.isend(x, 0)
    del x
    assert alive() is not None
    request.wait()
    assert alive() is None

"""The communicator over MPI keeps the contract in worlds of 1 to 4 ranks."""

import os
import resource
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from pydtnn.comm import mpi
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


@pytest.mark.mpi(1, checked=False)
def test_a_rank_has_left_the_call_in_which_the_others_are_counted(comm, monkeypatch):
    monkeypatch.setattr(mpi, "survives", lambda: True)
    monkeypatch.setattr(mpi, "all_succeeded", lambda library, group, complete: complete)
    lost = SimpleNamespace(Get_failed=lambda: SimpleNamespace(size=1, Free=lambda: None))
    with monkeypatch.context() as patch:
        patch.setattr(comm, "_comm", lost)
        assert not comm.all_remain()
    assert comm.supervision.slot.read().call is None


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


@each(
    ("limit", "value", "problem"),
    [
        ("RLIMIT_NOFILE", 32, r"66 open files \(ulimit -n\) for 2 ranks, got 32"),
        ("RLIMIT_FSIZE", 1 << 20, r"5,242,880 B of a file \(ulimit -f\) for 2 ranks, got 1,048"),
        ("f_blocks", 1 << 20, "3,276,800 B in /dev/shm .* for 2 ranks, got 1,048,576"),
        ("access", 0, "a folder /dev/shm that can be written"),
    ],
)
def test_what_mpi_would_not_start_with_is_refused_before(limit, value, problem, monkeypatch):
    """MPICH ends the process with a page of text, or its ranks wait for each other for ever."""
    memory = SimpleNamespace(f_blocks=value if limit == "f_blocks" else 0, f_frsize=1)
    limits = {getattr(resource, limit): value} if limit.startswith("R") else {}
    monkeypatch.setattr(os, "access", lambda path, mode: limit != "access")
    monkeypatch.setattr(os, "statvfs", lambda path: memory)
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2
    )
    with pytest.raises(ValueError, match=f"^mpi: MPICH 5 requires {problem}"):
        mpi._check_host("MPICH 5", 2)
    if limit != "access":
        mpi._check_host("MPICH 5", 1)

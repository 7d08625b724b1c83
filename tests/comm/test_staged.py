"""Device arrays over communicators of the host: the contract, the order of copies, hand-over."""

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.staged import CudaAware, Staged, _Copy
from tests import gpu
from tests.comm.communicator_contract import CommunicatorContract
from tests.comm.on_device import Aware, OnDevice
from tests.each import each
from tests.simulated import Fabric, SimulatedCupy


def staged(comm):
    """Stage the arrays of a fake device, whose streams take turns in another order on each rank."""
    xp = SimulatedCupy(Fabric(), seed=comm.rank)
    return OnDevice(Staged(comm, xp), xp)


def staged_on_gpu(comm):
    import cupy

    return OnDevice(Staged(comm, cupy), cupy)


def handed(comm):
    """Hand the arrays of a simulated device to a communicator that takes them."""
    xp = SimulatedCupy(Fabric(), seed=comm.rank)
    return OnDevice(CudaAware(Aware(comm), xp), xp)


@pytest.mark.threads(1, 3, through=staged)
@pytest.mark.mpi(2, through=staged)
class TestStaged(CommunicatorContract):
    pass


@gpu.needed()
@pytest.mark.threads(2, through=staged_on_gpu)
class TestStagedGpuThreads(CommunicatorContract):
    pass


@gpu.needed()
@pytest.mark.mpi(1, 2, through=staged_on_gpu)
class TestStagedGpuMpi(CommunicatorContract):
    pass


@pytest.mark.threads(1, 3, through=handed)
@pytest.mark.mpi(2, through=handed)
class TestCudaAware(CommunicatorContract):
    pass


def with_device(comm, seed=0):
    xp = SimulatedCupy(Fabric(), seed=seed + comm.rank)
    return Staged(comm, xp), xp


@pytest.mark.threads(2)
def test_a_call_that_only_the_host_makes_comes_after_the_operations_before_it(comm):
    comm, xp = with_device(comm)
    x = xp.asarray(np.ones(5))
    request = comm.iallreduce(x)
    while comm.rank == 0 and comm._queue:  # the copy has arrived here, but not on rank 1
        comm._queue.progress()
    assert comm.gather_object(comm.rank) == [0, 1]
    request.wait()
    assert (x.get() == 2).all()


@pytest.mark.threads(2)
def test_pinned_memory_lives_until_it_has_been_copied_to_the_device(comm):
    comm, xp = with_device(comm)
    arrays = [xp.asarray(np.full(1000, float(i))) for i in range(20)]
    for x in arrays:
        comm.allreduce(x)  # each gives its pinned memory back, while nothing has run yet
    for i, x in enumerate(arrays):
        assert (x.get() == 2 * i).all()


@pytest.mark.threads(1)
def test_mistakes_with_device_arrays_are_refused(comm):
    comm, xp = with_device(comm)
    x = xp.asarray(np.zeros(8))
    with pytest.raises(ValueError, match="contiguous"):
        comm.allreduce(x[::2])
    with pytest.raises(ValueError, match="out must not overlap"):
        comm.reduce_scatter(x, [8], x)
    with pytest.raises(ValueError, match="or not overlap out"):
        comm.allgather(x[:4], [4], x[2:6])
    with pytest.raises(TypeError, match="on the host and the whole array on a device"):
        comm.allgather(np.zeros(8), [8], x)


@each("call", ["barrier", "free"])
def test_operations_of_one_group_start_before_a_rank_waits_on_another(call, monkeypatch):
    monkeypatch.setattr(_Copy, "test", lambda self: False)  # copies that last

    def rank(comm):
        staged = Staged(comm, SimulatedCupy(Fabric()))
        other, x = staged.split(0), np.ones(3)
        request = staged.iallreduce(x)
        if comm.rank == 0:
            getattr(other, call)()
            request.wait()
        else:
            request.wait()
            getattr(other, call)()
        return x.tolist()

    assert run_threads(2, rank) == [[2, 2, 2]] * 2

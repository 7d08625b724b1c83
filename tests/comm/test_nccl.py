"""NCCL: the contract on a fake device, who takes which GPU, and on GPUs where there are any."""

import gc
import importlib.util
import weakref

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.nccl import OPERATIONS, TYPES, create_nccl
from pydtnn.utils.errors import AgreedError
from tests import gpu
from tests.comm.communicator_contract import CommunicatorContract
from tests.comm.devices import device_of
from tests.comm.on_device import OnDevice
from tests.each import each


def connected(comm, gpus=8, seed=0):
    """The communicator of simulated GPUs that meet in one fabric, and the rank's arrays."""
    xp = device_of(comm, seed, gpus)
    return create_nccl(comm, xp), xp


def over_nccl(comm):
    nccl, xp = connected(comm)
    return OnDevice(nccl, xp)


@pytest.mark.threads(1, 3, through=over_nccl)
class TestNccl(CommunicatorContract):
    pass


@pytest.mark.threads(2)
def test_the_host_does_not_wait_and_a_capture_is_not_asked(comm):
    comm, xp = connected(comm)
    x = xp.asarray(np.ones(4))
    request = comm.iallreduce(x)
    with xp.cuda.Stream() as stream:
        stream.begin_capture()
        assert not any(request.test() for _ in range(100))
        stream.end_capture()
    request.wait()
    comm.broadcast(x)
    comm.allgather(x[2 * comm.rank : 2 * comm.rank + 2], [2, 2], x)
    assert len(xp.current.work) > 0  # nothing has been carried out yet
    assert (x.get() == 2).all()


@pytest.mark.threads(2)
@each("seed", range(3))
def test_a_request_keeps_its_array_alive(comm, seed):
    comm, xp = connected(comm, seed=seed)
    x = xp.asarray(np.full(1000, comm.rank + 1.0))
    xp.current.synchronize()  # nothing but the request holds it afterwards
    request = comm.iallreduce(x)
    if comm.rank == 0:
        del x  # its memory would be used again by what the stream is given next
        xp.zeros(1000)
        request.wait()
        xp.current.synchronize()
    else:
        request.wait()
        assert (x.get() == 3).all()


@pytest.mark.threads(2)
def test_what_nccl_cannot_reduce_goes_through_the_host(comm):
    comm, xp = connected(comm)
    x = xp.asarray(np.full(5, comm.rank + 1, "int16"))
    comm.allreduce(x)
    assert (x.get() == 3).all()
    y = np.ones(2)
    comm.allreduce(y)  # a host array, as ever
    assert (y == 2).all()


@pytest.mark.threads(2)
def test_a_group_connects_when_it_is_needed_and_is_never_taken_down(comm):
    comm, xp = connected(comm)
    made = comm._group
    assert made is not None  # whoever cannot is to hear of it at the start
    group = comm.split(0)
    group.allreduce(np.ones(3))
    assert group._group is None
    group.allreduce(xp.ones(3))
    watched = weakref.ref(group._group)
    del group
    gc.collect()
    # NCCL would wait there for all ranks, and for graphs that Python may let go of later.
    assert watched() is not None


def test_ranks_that_share_a_gpu_are_refused_on_all_ranks():
    with pytest.raises(
        AgreedError, match=r"^nccl: ranks 0, 2 share GPU 0000, .* use --comm mpi\.$"
    ):
        run_threads(3, lambda comm: connected(comm, gpus=2))


def test_ranks_of_different_hosts_may_have_gpus_of_one_number():
    run_threads(4, lambda comm: connected(comm, gpus=2), hosts=["a", "a", "b", "b"])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.threads(2)
def test_without_cupy_all_ranks_hear_what_to_install(comm):
    with pytest.raises(AgreedError, match="nccl: CuPy cannot be imported; install it with `pip"):
        create_nccl(comm)


def test_types_and_operations_have_the_numbers_that_cupy_gives_them():
    cupy_nccl = pytest.importorskip("cupy.cuda.nccl")
    if not cupy_nccl.available:
        pytest.skip("NCCL cannot be loaded")
    names = vars(cupy_nccl)
    assert {name: names[f"NCCL_{name.upper()}"] for name in TYPES} == TYPES
    assert {name: names[f"NCCL_{name.upper()}"] for name in OPERATIONS} == OPERATIONS


def on_gpus(comm):
    try:
        nccl = create_nccl(comm)
    except AgreedError as error:  # two ranks on one GPU, and an NCCL before 2.30
        pytest.skip(str(error))
    return OnDevice(nccl, nccl.device.xp)


@gpu.needed(nccl=True)
@pytest.mark.threads(1, through=on_gpus)
class TestOneGpu(CommunicatorContract):
    pass


@gpu.needed(nccl=True)
@pytest.mark.mpi(1, 2, through=on_gpus)
class TestGpus(CommunicatorContract):
    pass

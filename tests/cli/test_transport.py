"""Which GPU a rank takes, and what then carries its arrays; no GPU is needed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parallel import choose_transport, take_gpu
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.cores import shared_gpu
from pydtnn.comm.nccl import NcclCommunicator
from pydtnn.comm.staged import CudaAware, Staged
from pydtnn.parallel.exchange import AllReduce
from pydtnn.utils.errors import AgreedError
from tests.comm.devices import device_of
from tests.each import each


def chosen(comm: Communicator, /, gpus: int = 8, **options: Any) -> Communicator:
    xp = device_of(comm, gpus=gpus)
    xp.gpu = comm.local_rank % gpus  # as `take_gpu` does
    return choose_transport(TrainConfig(device="cuda", **options), comm, xp)


@each("device", ["cpu", "numpy"])
def test_without_a_gpu_nothing_changes(device):
    config, comm = TrainConfig(device=device), Serial()
    assert take_gpu(config, comm) is None
    assert choose_transport(config, comm, None) is comm
    comm.supervise(supervision := object())
    assert chosen(comm).supervision is supervision  # of one rank, which sends no messages
    assert comm.transport == ""


@each(
    ("ranks", "options", "kind", "words"),
    [
        (1, {}, Serial, ""),
        (2, {}, NcclCommunicator, "NCCL 2.28.0"),
        (1, {"comm": "nccl"}, NcclCommunicator, "NCCL 2.28.0"),
        (2, {"comm": "mpi"}, Staged, "MPI, through pinned memory of the host"),
        (2, {"comm": "mpi", "cuda_aware": True}, CudaAware, "CUDA-aware MPI"),
    ],
)
def test_a_transport_is_chosen_and_described(ranks, options, kind, words):
    def rank(comm: Communicator) -> None:
        transport = chosen(comm, **options)
        assert isinstance(transport, kind)
        assert AllReduce(transport).comm.transport == words  # behind what counts

    run_threads(ranks, rank)


def test_ranks_that_share_a_gpu_are_told_and_nccl_refuses_them():
    def rank(comm: Communicator) -> str:
        transport = chosen(comm, gpus=2, comm="mpi")
        assert isinstance(transport, Staged)
        return shared_gpu(transport, transport.device.xp)

    assert run_threads(3, rank) == ["ranks 0, 2 share GPU 0000"] * 3
    assert run_threads(2, rank) == [""] * 2
    with pytest.raises(AgreedError, match=r"^nccl: ranks 0, 2 share GPU 0000, .* use --comm mpi"):
        run_threads(3, lambda comm: chosen(comm, gpus=2))


def test_two_ranks_may_share_a_gpu_where_nccl_was_told_so(monkeypatch):
    def rank(comm: Communicator, version: int) -> Communicator:
        xp = device_of(comm, gpus=1)
        xp.cuda.nccl.get_version = lambda: version  # type: ignore[method-assign]
        return choose_transport(TrainConfig(device="cuda"), comm, xp)

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert all(isinstance(comm, NcclCommunicator) for comm in run_threads(2, rank, 23003))
    for version in (22809, 23003):
        with pytest.raises(AgreedError, match="share GPU"):
            run_threads(2, rank, version)
        monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)


@each(("gpus", "numbers"), [(8, [0, 1, 2]), (2, [0, 1, 0]), (1, [0, 0, 0])])
def test_each_rank_takes_the_gpu_of_its_number(gpus, numbers, monkeypatch):
    def rank(comm: Communicator) -> int:
        xp = device_of(comm, gpus=gpus)
        xp.cuda.runtime.malloc, xp.cuda.runtime.free = lambda size: 0, lambda pointer: None
        for turn in range(comm.size):  # ranks are threads, which share what `import cupy` finds
            comm.barrier()
            if turn == comm.rank:
                monkeypatch.setitem(sys.modules, "cupy", xp)
                assert take_gpu(TrainConfig(device="cuda"), comm) is xp
            comm.barrier()
        return xp.gpu

    assert run_threads(3, rank) == numbers

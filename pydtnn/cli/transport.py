"""Selection of each rank's GPU and of the communicator for its arrays."""

from __future__ import annotations

from typing import Any

from pydtnn.cli.config import TrainConfig
from pydtnn.comm import Communicator
from pydtnn.comm.nccl import NcclCommunicator, create_nccl
from pydtnn.comm.serial import Serial
from pydtnn.comm.staged import CudaAware, Staged
from pydtnn.comm.wrapper import Wrapper


def take_gpu(config: TrainConfig, comm: Communicator) -> Any:
    """Make this rank's GPU the current device of this thread.

    Returns
    -------
    module or None
        CuPy, or None if `--device` is not "cuda".

    Raises
    ------
    ImportError
        If CuPy or a GPU is missing.
    """
    if config.device != "cuda":
        return None
    from pydtnn.kernels.cuda.libraries import usable_cupy

    return usable_cupy(local_rank=comm.local_rank)


def choose_transport(config: TrainConfig, comm: Communicator, cupy: Any) -> Communicator:
    """Create the communicator for arrays of the device. Collective: all ranks call it.

    Parameters
    ----------
    config : TrainConfig
    comm : Communicator
        Communicator for host arrays, with the allreduce that `--allreduce` names.
    cupy : module or None
        Return value of `take_gpu`.

    Raises
    ------
    AgreedError
        On all ranks, if NCCL is requested and cannot be used.
    """
    if cupy is None:
        return comm
    if config.comm == "nccl" or (config.comm == "auto" and comm.size > 1):
        return create_nccl(comm, cupy)
    if config.comm == "auto":
        serial = Serial()  # one rank sends no messages, even if mpirun started it
        serial.supervise(comm.supervision)
        return serial
    return CudaAware(comm, cupy) if config.cuda_aware else Staged(comm, cupy)


def describe_transport(comm: Communicator) -> str:
    """Describe the transport of device arrays; empty if there is no other rank."""
    while isinstance(comm, Wrapper):
        if isinstance(comm, NcclCommunicator):
            return f"NCCL {comm.version}"
        if isinstance(comm, CudaAware):
            return "CUDA-aware MPI"
        if isinstance(comm, Staged):
            return "MPI, through pinned memory of the host"
        comm = comm.inner
    return ""


def gpu_facts(cupy: Any) -> dict[str, str]:
    """Return the facts that can change the last bits of a GPU's results."""
    runtime = cupy.cuda.runtime
    number = runtime.runtimeGetVersion()
    return {
        "GPU": runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "CUDA": f"{number // 1000}.{number % 1000 // 10}",
        "CuPy": cupy.__version__,
    }

"""How the ranks of a run communicate: mesh, allreduce, transport of arrays on GPUs."""

from __future__ import annotations

from math import prod
from typing import Any

from pydtnn.cli.config import TrainConfig, read_axes
from pydtnn.cli.parts import find
from pydtnn.comm import Communicator
from pydtnn.comm.schedules.rule import RULE, VENDOR, create_allreduce
from pydtnn.comm.serial import Serial
from pydtnn.kernels import import_cuda
from pydtnn.parallel.mesh import Mesh
from pydtnn.utils.tools import find_tool


def choose_allreduce(config: TrainConfig, comm: Communicator) -> Communicator:
    """Return the communicator with the allreduce of `--allreduce`. Collective: all ranks call it.

    Raises
    ------
    ValueError
        If the name is unknown, or a custom algorithm does not compute the sum on these ranks.
    """
    found, _ = find(config, "allreduce")
    if found.ready:
        tool = find_tool("schedules", "train: --allreduce: the proof of an algorithm")
        tool.check(found.target, comm.hosts)  # an incorrect one would deadlock or sum wrongly
    # On GPUs the transport sums arrays, unless they are staged in host memory.
    device = config.device == "cuda" and (config.comm != "mpi" or config.cuda_aware)
    return create_allreduce(VENDOR if device and found.name == RULE else found, comm)


def create_mesh(text: str | None, comm: Communicator) -> Mesh | None:
    """Return the mesh that `--parallel` describes, None if it is not set. Collective."""
    axes = axes_over(text, comm)
    return Mesh(comm, **axes) if axes else None


def axes_over(text: str | None, comm: Communicator) -> dict[str, int]:
    """Return the ranks along each axis that `--parallel` names; none for "auto".

    Raises
    ------
    ValueError
        If the axes do not multiply to the number of ranks.
    """
    axes = read_axes(text)
    ranks = prod(axes.values())
    if axes and ranks != comm.size:
        raise ValueError(
            f"train: --parallel: axes must multiply to the number of ranks, {comm.size}, got "
            f"{text}, which is {ranks}; use mpirun -np {ranks}, other axes, or "
            f"--parallel {text}:exact=true, with which fewer processes share the ranks"
        )
    return axes


def describe_mesh(mesh: Mesh) -> str:
    """Describe the axes of a mesh: "data 2 x filter 4"."""
    axes = " x ".join(f"{axis} {ranks}" for axis, ranks in mesh.shape.items())
    return axes if mesh.copies is None else f"{axes}, in {mesh.copies} copies"


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
    return import_cuda(".libraries").usable_cupy(local_rank=comm.local_rank)


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
    from pydtnn.comm.nccl import create_nccl  # loaded with a GPU only
    from pydtnn.comm.staged import CudaAware, Staged

    if config.comm == "nccl" or (config.comm == "auto" and comm.size > 1):
        return create_nccl(comm, cupy)
    if config.comm == "auto":
        serial = Serial()  # one rank sends no messages, even if mpirun started it
        serial.supervise(comm.supervision)
        return serial
    return CudaAware(comm, cupy) if config.cuda_aware else Staged(comm, cupy)


def gpu_facts(cupy: Any) -> dict[str, str]:
    """Return the facts that can change the last bits of a GPU's results."""
    runtime = cupy.cuda.runtime
    number = runtime.runtimeGetVersion()
    return {
        "GPU": runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "CUDA": f"{number // 1000}.{number % 1000 // 10}",
        "CuPy": cupy.__version__,
    }

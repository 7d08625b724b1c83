"""Making the ``cuda`` backend: the GPU, its libraries, memory and families of kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import AutotunerFile, create_autotuner
from pydtnn.kernels.backend import Backend
from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.attention import CudaAttention
from pydtnn.kernels.cuda.conv import CudaConv, Tools
from pydtnn.kernels.cuda.cublas import CublasError, Products
from pydtnn.kernels.cuda.cudnn import Cudnn, CudnnError, Handle
from pydtnn.kernels.cuda.cudnn_conv import CudnnConvolutions
from pydtnn.kernels.cuda.cudnn_graph import GraphConvolutions
from pydtnn.kernels.cuda.elementwise import CudaElementwise
from pydtnn.kernels.cuda.engine import Measure
from pydtnn.kernels.cuda.fused import CudaFused
from pydtnn.kernels.cuda.images import PrepareKernel
from pydtnn.kernels.cuda.linear import CudaLinear
from pydtnn.kernels.cuda.loss import CudaLoss
from pydtnn.kernels.cuda.memory import DeviceMemory
from pydtnn.kernels.cuda.module import DeviceState
from pydtnn.kernels.cuda.norm import CudaNorm
from pydtnn.kernels.cuda.pool import CudaPool
from pydtnn.kernels.cuda.random import CudaRandom
from pydtnn.kernels.cuda.rows import Rows
from pydtnn.kernels.cuda.update import CudaUpdate
from pydtnn.kernels.reference.family import Array
from pydtnn.utils.version import __version__

TF32 = "PYDTNN_TF32"
"""Environment variable: 0 keeps float32 from being rounded to TF32 before it is multiplied."""


@dataclass(frozen=True)
class CudaBackend(Backend):
    """Kernels and memory of one GPU.

    Kernels run on CuPy's current stream, one stream at a time. Arrays come from CuPy's current
    allocator: its pool, or that of a graph that is being captured (`DeviceMemory.apart`).

    Parameters
    ----------
    device : int
        Number of the GPU among those that this process sees.
    gpu : str
        What it is called.
    versions : tuple of str
        The libraries, with their versions.
    tf32 : bool
        Whether float32 is rounded to TF32 before it is multiplied.
    alive : Array, shape (1,), float64
        Beside `go`, the flag that holds all later updates back: see `own.Device`.
    """

    device: int = 0
    gpu: str = ""
    versions: tuple[str, ...] = ()
    tf32: bool = False
    alive: Array = None

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Bring an array or a sequence to the GPU, in C order; copies only where it must.

        Raises
        ------
        RuntimeError
            For an array of the host while a step is captured: CuPy copies it by way of memory that
            belongs to others when the step is replayed.
        """
        here = hasattr(value, "__cuda_array_interface__")
        if not here and self.xp.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                "backend cuda: an array of the host cannot be brought to the GPU while a step is "
                "captured in a graph; bring it there before the step."
            )
        return self.xp.asarray(value, None if dtype is None else np.dtype(dtype), order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        """Bring an array to the host, when what computes it has finished."""
        return self.xp.asnumpy(array)

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was given, on every stream."""
        self.xp.cuda.Device(self.device).synchronize()


def create_cuda_backend(
    *, device: int | None = None, tf32: bool | None = None, tuning: str | None = None
) -> CudaBackend:
    """Make a backend for a GPU, which becomes the current one of this thread.

    Parameters
    ----------
    device : int, optional
        Number of the GPU among those that this process sees; by default the current one.
    tf32 : bool, optional
        Whether float32 may be rounded to TF32, 10 bits, before it is multiplied; sums stay float32.
        By default yes, unless `PYDTNN_TF32` is 0.
    tuning : str, optional
        See `create_autotuner`.

    Raises
    ------
    Unavailable
        If there is no GPU that can be used, or a library is missing or does not fit.
    ValueError
        For a GPU, a tuning or a value of `PYDTNN_TF32` that does not exist.
    """
    tf32 = _tf32() if tf32 is None else tf32
    cupy = libraries.usable_cupy(device)
    gpu = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(gpu.id)["name"].decode()
    found = [libraries.load(library) for library in ("cudnn", "cublas", "nvrtc")]
    versions = tuple(map(str, found))
    arithmetic = "TF32" if tf32 else "float32"
    machine = ", ".join((name, *versions, f"pydtnn {__version__}"))
    autotuner = create_autotuner(tuning, arithmetic, AutotunerFile(machine))
    memory, own = DeviceMemory(cupy), DeviceState(cupy)
    try:
        cudnn, multiply = Cudnn(found[0]), Products(found[1], cupy, tf32=tf32)
        handle = Handle(cudnn, cupy)
    except (CudnnError, CublasError) as error:
        raise libraries.Unavailable(f"backend cuda: {name} cannot be used: {error}") from error
    families: dict[str, Any] = {
        "attention": CudaAttention(cupy, multiply),
        "elementwise": CudaElementwise(cupy, own),
        "fused": CudaFused(cupy, own),
        "linear": CudaLinear(cupy, own, multiply),
        "loss": CudaLoss(cupy, own),
        "norm": CudaNorm(cupy, own),
        "pool": CudaPool(cupy, own),
        "random": CudaRandom(cupy, own),
        "recurrent": reference.RecurrentKernels(cupy),
        "update": CudaUpdate(cupy, own),
    }
    tools = Tools(
        Measure(cupy, memory).session,
        *(families[family] for family in ("fused", "norm", "elementwise")),
    )
    shared = (cudnn, cupy, handle, tools.elementwise, memory.scratch)
    graphs = GraphConvolutions(*shared, tf32=tf32)
    engines = graphs, CudnnConvolutions(*shared, tf32=tf32), Rows(cupy, multiply)
    families["conv"] = CudaConv(cupy, engines, autotuner, tools, graphs)
    return CudaBackend(
        name="cuda",
        xp=cupy,
        threads=1,
        isa=f"sm_{gpu.compute_capability}",
        autotuner=autotuner,
        **families,
        memory=memory,
        keeps_values=True,
        gates=False,
        images=PrepareKernel(own),
        device=gpu.id,
        gpu=name,
        versions=versions,
        tf32=tf32,
        go=own.go,
        alive=own.alive,
    )


def _tf32() -> bool:
    value = os.environ.get(TF32, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{TF32} must be 0 or 1, not {value!r}.")
    return value == "1"

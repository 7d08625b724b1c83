"""Making the ``cuda`` backend: the GPU, its libraries, memory and families of kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn import __version__
from pydtnn.kernels.backend import Backend
from pydtnn.kernels.choices import create_choices
from pydtnn.kernels.choices_file import ChoicesFile
from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.conv import Conv, Tools
from pydtnn.kernels.cuda.cublas import Products
from pydtnn.kernels.cuda.cudnn import Cudnn, CudnnError
from pydtnn.kernels.cuda.cudnn_conv import CudnnConvolutions
from pydtnn.kernels.cuda.elementwise import Elementwise
from pydtnn.kernels.cuda.fused import Fused
from pydtnn.kernels.cuda.linear import Linear
from pydtnn.kernels.cuda.loss import Loss
from pydtnn.kernels.cuda.norm import Norm
from pydtnn.kernels.cuda.own import Device
from pydtnn.kernels.cuda.pool import Pool
from pydtnn.kernels.cuda.random import Random
from pydtnn.kernels.cuda.rows import Rows
from pydtnn.kernels.cuda.update import Update
from pydtnn.kernels.reference.family import Array

TF32 = "PYDTNN_TF32"
"""Environment variable: 0 keeps float32 from being rounded to TF32 before it is multiplied."""


@dataclass(frozen=True)
class CudaBackend(Backend):
    """Kernels and memory of one GPU.

    Kernels run on CuPy's current stream, one stream at a time. Arrays and scratch memory come from
    CuPy's current allocator: its pool, or that of a graph that is being captured.

    Parameters
    ----------
    device : int
        Number of the GPU among those that this process sees.
    versions : tuple of str
        The libraries, with their versions.
    """

    device: int = 0
    versions: tuple[str, ...] = ()

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Bring an array or a sequence to the GPU, in C order; copies only where it must."""
        return self.xp.asarray(value, None if dtype is None else np.dtype(dtype), order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        """Bring an array to the host, when what computes it has finished."""
        return self.xp.asnumpy(array)

    def trim(self) -> None:
        """Return blocks of CuPy's pool that nobody uses to the driver."""
        self.xp.get_default_memory_pool().free_all_blocks()


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
        See `create_choices`.

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
    found = libraries.load("cudnn"), libraries.load("cublas")
    versions = tuple(map(str, found))
    arithmetic = "TF32" if tf32 else "float32"
    machine = ", ".join((name, *versions, f"pydtnn {__version__}"))
    choices = create_choices(tuning, arithmetic, ChoicesFile(machine))
    try:
        convolve = CudnnConvolutions(Cudnn(found[0]), cupy, tf32=tf32)
    except CudnnError as error:
        raise libraries.Unavailable(f"{found[0]} cannot use {name}: {error}") from error
    multiply, own = Products(found[1], cupy, tf32=tf32), Device(cupy)
    families: dict[str, Any] = {
        "elementwise": Elementwise(cupy, own),
        "fused": Fused(cupy, own),
        "linear": Linear(cupy, own, multiply),
        "loss": Loss(cupy, own),
        "norm": Norm(cupy, own),
        "pool": Pool(cupy, own),
        "random": Random(cupy, own),
        "update": Update(cupy, own),
    }
    tools = Tools(
        lambda: cupy.cuda.get_current_stream().synchronize(),
        *(families[family] for family in ("fused", "norm", "elementwise")),
    )
    families["conv"] = Conv(cupy, (convolve, Rows(cupy, multiply)), choices, tools)
    return CudaBackend(
        name="cuda",
        xp=cupy,
        threads=1,
        isa=f"sm_{gpu.compute_capability}",
        choices=choices,
        **families,
        keeps_values=True,
        device=gpu.id,
        versions=versions,
    )


def _tf32() -> bool:
    value = os.environ.get(TF32, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{TF32} must be 0 or 1, not {value!r}.")
    return value == "1"

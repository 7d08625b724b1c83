"""Kernels: forward and backward of every operation on plain arrays, per device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import Autotuner, AutotunerFile, create_autotuner
from pydtnn.kernels.backend import Backend, recycled
from pydtnn.kernels.deferred import Deferred, Source, Term
from pydtnn.kernels.geometry import ConvGeometry, PoolGeometry
from pydtnn.utils.machine import MAX_THREADS, default_threads
from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_int

__all__ = [
    "BACKENDS",
    "Backend",
    "ConvGeometry",
    "Deferred",
    "PoolGeometry",
    "Source",
    "Term",
    "create_backend",
    "recycled",
    "report",
]

BACKENDS = ("cpu", "cuda", "numpy")
"""Names of the backends."""


def create_backend(
    name: str = "cpu",
    *,
    threads: int | None = None,
    isa: str | None = None,
    tuning: str | None = None,
    device: int | None = None,
    tf32: bool | None = None,
) -> Backend:
    """Create a backend.

    Parameters
    ----------
    name : str
        "cpu" (compiled kernels), "cuda" (a GPU) or "numpy" (the readable reference, slow).
    threads : int, optional
        Threads per kernel; by default `OMP_NUM_THREADS`, otherwise the cores available to this
        process.
    isa : str, optional
        "amx", "avx512_bf16", "avx512", "avx2" or "generic"; by default the best of the CPU, or
        `PYDTNN_ISA`.
    tuning : str, optional
        Choice of algorithms, see `Autotuner`: "measure", "fixed" or "direct"; by default
        `PYDTNN_TUNING`, otherwise "measure". The reference has one algorithm only.
    device, tf32 : optional
        Options of a "cuda" backend, see `pydtnn.kernels.cuda.create_cuda_backend`.

    Raises
    ------
    ValueError
        If the name or tuning is unknown, this CPU or build does not support the instruction set,
        or the GPU does not exist.
    ImportError
        If the backend is "cuda" and there is no usable GPU, or a library is missing.
    """
    if name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    threads = default_threads() if threads is None else threads
    check_int("create_backend", "threads", threads, at_least=1, at_most=MAX_THREADS)
    if name == "cpu":
        from pydtnn.kernels.cpu import MemoryPool, create_families, select_isa, this_machine

        isa = select_isa(isa)
        setting = f"{isa}, {threads} thread{'s' * (threads > 1)}"
        autotuner = create_autotuner(tuning, setting, AutotunerFile(this_machine))
        families = create_families(threads, isa, autotuner)
        pool = MemoryPool()
        return Backend("cpu", np, threads, isa, autotuner, **families, memory=pool, scales=True)
    if name == "cuda":
        return import_cuda().create_cuda_backend(device=device, tf32=tf32, tuning=tuning)
    plain: dict[str, Any] = {name: family(np) for name, family in reference.FAMILIES.items()}
    return Backend("numpy", np, 1, "none", Autotuner("direct"), **plain)


def import_cuda(module: str = "") -> Any:
    """Import the code for GPUs, or a module of it such as ".libraries".

    Raises
    ------
    ImportError
        If this installation does not have it, or a library is missing.
    """
    try:
        return import_module(f"pydtnn.kernels.cuda{module}")
    except ModuleNotFoundError as error:
        if error.name != "pydtnn.kernels.cuda":
            raise
        raise ImportError("backend cuda: the code for GPUs is not installed") from None


def report(backend: Backend) -> dict[str, str]:
    """Return for each kernel whether it is the device's or the reference, and the choices made.

    Returns
    -------
    dict
        ``{"conv.forward": "cpu", "pool.adaptive_forward": "reference", ...}``; then the choices so
        far, with reasons: ``{"conv.forward 3x3 16->16 on 32x32 padding 1 float32, batch 64":
        "winograd4, measured: winograd4 0.58 ms, direct 1.04 ms"}``.
    """
    kernels = {
        f"{family}.{kernel}": (
            "reference"
            if getattr(type(getattr(backend, family)), kernel) is getattr(kernels, kernel)
            else backend.name
        )
        for family, kernels in reference.FAMILIES.items()
        for kernel in vars(kernels)
        if not kernel.startswith("_")
    }
    return kernels | backend.autotuner.report()

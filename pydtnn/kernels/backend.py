"""Backends: one small object per device, with an array module and families of kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import Autotuner, create_autotuner
from pydtnn.kernels.reference.family import Array
from pydtnn.utils.machine import MAX_THREADS, default_threads
from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_int

BACKENDS = ("cpu", "cuda", "numpy")

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Backend:
    """Kernels and memory of one device.

    Parameters
    ----------
    name : str
        "cpu", "cuda" or "numpy".
    xp : module
        Array module: arrays of this backend are ``xp.ndarray``.
    threads : int
        Threads that each kernel uses. Results do not depend on it, but measured choices may.
    isa : str
        Instruction set of the compiled kernels, for a GPU "sm_90" and so on; "none" without these.
    autotuner : Autotuner
        The algorithms of the kernels.
    linear, conv, pool, norm, fused, attention, elementwise, loss, update, random
        The families of kernels.
    memory : MemoryPool or None
        The pool of large arrays; None if the array module allocates them.
    keeps_values : bool
        Whether the values of deferred inputs are stored for backward: if convolutions cannot
        evaluate them while reading, storing costs less than a second evaluation.
    gates : bool
        Whether convolutions apply the ReLU mask to the gradient of a deferred input: otherwise the
        layer that deferred it does, in one kernel with the coefficients of batch norm.
    go : Array or None
        One float64 in the device's memory, normally 1: if it is 0, update kernels change nothing.
        None on the host.
    images : object or None
        Kernels that augment and normalise raw images; None if the host does this.

    Attributes
    ----------
    has_values : bool
        Whether arrays have values; not while memory and time are predicted, where a layer must not
        depend on them.
    """

    has_values: ClassVar[bool] = True

    name: str
    xp: Any
    threads: int
    isa: str
    autotuner: Autotuner
    linear: reference.Linear
    conv: reference.Conv
    pool: reference.Pool
    norm: reference.Norm
    fused: reference.Fused
    attention: reference.Attention
    elementwise: reference.Elementwise
    loss: reference.Loss
    update: reference.Update
    random: reference.Random
    memory: Any = None
    keeps_values: bool = False
    gates: bool = True
    go: Any = None
    images: Any = None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array with undefined contents."""
        return (self.memory or self.xp).empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array of zeros."""
        return (self.memory or self.xp).zeros(shape, dtype)

    def recycling(self) -> AbstractContextManager[None]:
        """Return a context in which NumPy allocates large arrays from this backend's memory."""
        return self.memory.recycling() if self.memory else nullcontext()

    def trim(self) -> None:
        """Return unused memory to the system, as far as possible."""
        if self.memory:
            self.memory.trim()

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Convert an array or a sequence to a device array in C order; copies only if necessary."""
        return self.xp.asarray(value, dtype, order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        """Convert a device array to a NumPy array; copies only if necessary."""
        return np.asarray(array)


def recycled(method: Method) -> Method:
    """Decorate a method of an object with a `backend` to run in the context `Backend.recycling`."""

    @wraps(method)
    def within(self: Any, *args: Any, **options: Any) -> Any:
        with self.backend.recycling():
            return method(self, *args, **options)

    return cast(Method, within)


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
        from pydtnn.kernels.cpu import MemoryPool, create_families, select_isa

        isa = select_isa(isa)
        autotuner = create_autotuner(tuning, f"{isa}, {threads} thread{'s' * (threads > 1)}")
        families = create_families(threads, isa, autotuner)
        return Backend("cpu", np, threads, isa, autotuner, **families, memory=MemoryPool())
    if name == "cuda":
        from pydtnn.kernels.cuda import create_cuda_backend

        return create_cuda_backend(device=device, tf32=tf32, tuning=tuning)
    plain: dict[str, Any] = {name: family(np) for name, family in reference.FAMILIES.items()}
    return Backend("numpy", np, 1, "none", Autotuner("direct"), **plain)


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

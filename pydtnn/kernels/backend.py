"""Backends: one small object per device, holding an array module and families of kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import Autotuner, create_autotuner
from pydtnn.kernels.reference.family import Array
from pydtnn.utils.suggest import unknown
from pydtnn.utils.threads import MOST_THREADS, default_threads
from pydtnn.utils.validate import whole

BACKENDS = ("cpu", "cuda", "numpy")

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Backend:
    """Kernels and memory of one device.

    Parameters
    ----------
    name : str
        What users call it: "cpu", "cuda" or "numpy".
    xp : module
        Array module: arrays of this backend are ``xp.ndarray``.
    threads : int
        Threads that each kernel uses. Results do not depend on it, but measured choices may.
    isa : str
        Instruction set of the compiled kernels, of a GPU "sm_90" and so on; "none" where none are.
    autotuner : Autotuner
        Which algorithms the kernels take.
    linear, conv, pool, norm, fused, elementwise, loss, update, random
        The families of kernels.
    memory : MemoryPool or None
        Where large arrays come from; None where they are the array module's own.
    keeps_values : bool
        Whether what convolutions evaluate of deferred inputs is kept for backward: where they
        cannot evaluate in passing, memory is cheaper than evaluating it again.
    gates : bool
        Whether convolutions gate the gradient of a deferred input in passing: where they cannot,
        the layer that deferred it does it, in one kernel with what batch norm makes of the sums.
    go : Array or None
        One float64 in the device's memory, 1 at rest: where it is 0, kernels that update leave
        everything as it is. None on the host, which decides by itself.
    images : object or None
        Kernels that augment and normalise raw images; None where the host does that.
    """

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
        """Return a context in which NumPy's large arrays, too, come from this backend's memory."""
        return self.memory.recycling() if self.memory else nullcontext()

    def trim(self) -> None:
        """Return memory that only waits to be used again to the system, as far as it can be."""
        if self.memory:
            self.memory.trim()

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Bring an array or a sequence to the device, in C order; copies only where it must."""
        return self.xp.asarray(value, dtype, order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        """Bring an array of the device to the host, without a copy where none is needed."""
        return np.asarray(array)


def recycled(method: Method) -> Method:
    """Let a method of an object that has a `backend` run in the context `Backend.recycling`."""

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
    """Make a backend.

    Parameters
    ----------
    name : str
        "cpu" (compiled kernels), "cuda" (a GPU) or "numpy" (the readable reference, slow).
    threads : int, optional
        Threads per kernel; by default `OMP_NUM_THREADS`, else the cores this process may use.
    isa : str, optional
        "avx512", "avx2" or "generic"; by default the best the CPU has, which `PYDTNN_ISA` lowers.
    tuning : str, optional
        How algorithms are chosen, see `Autotuner`: "measure", "fixed" or "direct"; by default what
        `PYDTNN_TUNING` says, and without it "measure". The reference has nothing to choose.
    device, tf32 : optional
        Of a "cuda" backend, see `pydtnn.kernels.cuda.create_cuda_backend`.

    Raises
    ------
    ValueError
        For an unknown name or tuning, an instruction set that this CPU or build lacks, or a GPU
        that is not there.
    ImportError
        If the backend is "cuda" and there is no GPU, or no library, that can be used.
    """
    if name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    threads = default_threads() if threads is None else threads
    whole("create_backend", "threads", threads, at_least=1, at_most=MOST_THREADS)
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
    """Say for each kernel whether the device has its own or runs the reference, and what it chose.

    Returns
    -------
    dict
        ``{"conv.forward": "cpu", "pool.adaptive_forward": "reference", ...}``; then what was chosen
        so far, and why: ``{"conv.forward 3x3 16->16 on 32x32 padding 1 float32, batch 64":
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

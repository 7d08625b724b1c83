"""Backends: one small object per device, holding an array module and families of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.reference.family import Array
from pydtnn.suggest import unknown
from pydtnn.threads import default_threads

BACKENDS = ("cpu", "numpy")


@dataclass(frozen=True)
class Backend:
    """Kernels and memory of one device.

    Parameters
    ----------
    name : str
        What users call it: "cpu" or "numpy".
    xp : module
        Array module: arrays of this backend are ``xp.ndarray``.
    threads : int
        Threads that each kernel uses. Results do not depend on it.
    isa : str
        Instruction set of the compiled kernels; "none" where none are.
    linear, conv, pool, norm, elementwise, loss, update, random
        The families of kernels.
    """

    name: str
    xp: Any
    threads: int
    isa: str
    linear: reference.Linear
    conv: reference.Conv
    pool: reference.Pool
    norm: reference.Norm
    elementwise: reference.Elementwise
    loss: reference.Loss
    update: reference.Update
    random: reference.Random

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array with undefined contents."""
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array of zeros."""
        return self.xp.zeros(shape, dtype)

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        """Bring an array or a sequence to the device, in C order; copies only where it must."""
        return self.xp.asarray(value, dtype, order="C")

    def to_numpy(self, array: Array) -> np.ndarray:
        """Bring an array of the device to the host, without a copy where none is needed."""
        return np.asarray(array)


def create_backend(
    name: str = "cpu", *, threads: int | None = None, isa: str | None = None
) -> Backend:
    """Make a backend.

    Parameters
    ----------
    name : str
        "cpu" (compiled kernels) or "numpy" (the readable reference, slow).
    threads : int, optional
        Threads per kernel; by default `OMP_NUM_THREADS`, else the cores this process may use.
    isa : str, optional
        "avx512", "avx2" or "generic"; by default the best the CPU has, which `PYDTNN_ISA` lowers.

    Raises
    ------
    ValueError
        For an unknown name, or an instruction set that this CPU or build lacks.
    """
    if name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    threads = default_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"create_backend: threads must be at least 1, not {threads}")
    if name == "cpu":
        from pydtnn.kernels.cpu import create_families, select_isa

        isa = select_isa(isa)
        return Backend("cpu", np, threads, isa, **create_families(threads, isa))
    plain: dict[str, Any] = {name: family(np) for name, family in reference.FAMILIES.items()}
    return Backend("numpy", np, 1, "none", **plain)


def report(backend: Backend) -> dict[str, str]:
    """Say for each kernel whether the device has its own or runs the reference.

    Returns
    -------
    dict
        ``{"conv.forward": "cpu", "pool.adaptive_forward": "reference", ...}``
    """
    return {
        f"{family}.{kernel}": (
            "reference"
            if getattr(type(getattr(backend, family)), kernel) is getattr(kernels, kernel)
            else backend.name
        )
        for family, kernels in reference.FAMILIES.items()
        for kernel in vars(kernels)
        if not kernel.startswith("_")
    }

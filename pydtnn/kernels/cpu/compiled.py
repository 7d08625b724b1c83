"""Base class of compiled families: kernels, number of threads, supported arrays."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np

from pydtnn.kernels.cpu._arrays import beside, contiguous, gradient, native, supported
from pydtnn.kernels.cpu._team import usable
from pydtnn.kernels.cpu.isa import number

__all__ = [
    "FLOAT64",
    "HALF",
    "REALS",
    "STORED",
    "Compiled",
    "beside",
    "contiguous",
    "gradient",
    "native",
    "supported",
]

FLOAT64 = np.dtype(np.float64)

REALS = (np.dtype(np.float32), FLOAT64)
"""Types of all kernels."""

HALF = np.dtype("bfloat16")

STORED = (*REALS, HALF)
"""Types of the activations of most kernels."""


class Compiled:
    """Mixin for a reference family; the subclass replaces kernels by compiled ones.

    Kernels call the reference for arrays for which `native` or, if there is a variant for bfloat16,
    `supported` is false (another type, an output that is not contiguous); inputs that are not
    contiguous are copied.

    Parameters
    ----------
    xp : module
        ``numpy``.
    isa : str
        Instruction set, one of ``isa.available()``.
    threads : int
        Threads of every kernel call; in a child of `fork` one, see `_team`.
    """

    table: ClassVar[Any]
    """Extension class of the family, constructed with the number of the instruction set."""

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family follows in the MRO
        self._threads = threads
        self.kernels = self.table(number(isa))

    @property
    def threads(self) -> int:
        """Number of threads for a kernel call."""
        return usable(self._threads)

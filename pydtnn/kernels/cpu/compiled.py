"""What compiled families share: a table of kernels, a number of threads, the arrays they take."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels.cpu._arrays import contiguous, native
from pydtnn.kernels.cpu._team import usable
from pydtnn.kernels.cpu.isa import number

__all__ = ["REALS", "Compiled", "contiguous", "native"]

REALS = (np.dtype(np.float32), np.dtype(np.float64))


class Compiled:
    """Mixed into a reference family, whose kernels the subclass replaces by compiled ones.

    A kernel that meets arrays for which `native` is false (another type, an output that is not
    contiguous) hands them to the reference; inputs that are not contiguous are copied.

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
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family comes after us
        self._threads = threads
        self.kernels = self.table(number(isa))

    @property
    def threads(self) -> int:
        """How many threads a kernel that is called now may use."""
        return usable(self._threads)

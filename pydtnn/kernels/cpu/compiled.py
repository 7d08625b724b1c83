"""What the compiled families share: the table of kernels, the number of threads, which arrays they take."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels.cpu.isa import number
from pydtnn.kernels.reference.family import Array

REALS = (np.dtype(np.float32), np.dtype(np.float64))


class Compiled:
    """Mixed into a reference family, whose kernels the subclass replaces by compiled ones.

    Parameters
    ----------
    xp : module
        ``numpy``.
    isa : str
        Instruction set, one of ``isa.available()``.
    threads : int
        Threads of every kernel call.
    """

    table: ClassVar[Any]
    """Extension class that holds the family's kernels, constructed with the number of the instruction set."""

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family comes after us
        self.threads = threads
        self.kernels = self.table(number(isa))


def native(out: Array, *inputs: Array | None) -> bool:
    """Whether the compiled kernels take these arrays: one real type, and a contiguous output."""
    dtype = out.dtype
    return (
        dtype in REALS
        and out.flags.carray
        and all(array is None or array.dtype == dtype for array in inputs)
    )


def contiguous(array: Array) -> Array:
    """Return `array` itself if its elements lie in order, else a copy in which they do."""
    return array if array.flags.carray else np.require(array, requirements="CA")

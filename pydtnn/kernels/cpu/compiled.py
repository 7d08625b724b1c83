"""Base class of compiled families: kernels, number of threads, supported arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction, unwrap
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  # makes "bfloat16" a dtype
import numpy as np

from pydtnn.kernels.cpu._arrays import beside, contiguous, gradient, native, supported
from pydtnn.kernels.cpu._elementwise import ElementwiseKernels
from pydtnn.kernels.cpu._team import usable
from pydtnn.kernels.cpu.isa import number
from pydtnn.kernels.reference.family import Array

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
    "require",
    "supported",
]

FLOAT64 = np.dtype(np.float64)
"""The type in which gradients are checked."""

REALS = (np.dtype(np.float32), FLOAT64)
"""Types of all kernels."""

HALF = np.dtype("bfloat16")
"""The type of 16 bits that kernels read and write."""

STORED = (*REALS, HALF)
"""Types of the activations of most kernels."""


class UnsupportedArrays(Exception):
    """Raised by `require`."""


def require(supported: bool) -> None:
    """Let the reference run instead of the calling kernel, unless the arrays are supported."""
    if not supported:
        raise UnsupportedArrays


def _or_reference(family: type, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of a family that runs on the reference if its arrays are not supported."""

    @wraps(kernel)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return kernel(self, *args, **options)
        except UnsupportedArrays:
            pass
        return getattr(super(family, self), kernel.__name__)(*args, **options)

    return call


class Compiled:
    """Mixin for a reference family; the subclass replaces kernels by compiled ones.

    Kernels `require` that arrays are `native` or, if there is a variant for bfloat16, `supported`,
    before they write anything; of others (another type, an output that is not contiguous) the
    reference is called instead. Those of the shortest steps call it themselves, which costs less.
    Inputs that are not contiguous are copied.

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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, kernel in [*vars(cls).items()]:
            replaces = isfunction(kernel) and hasattr(super(cls, cls), name)
            if replaces and not {name[0], *unwrap(kernel).__code__.co_names} & {"_", "super"}:
                setattr(cls, name, _or_reference(cls, kernel))

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family follows in the MRO
        self._threads = threads
        self.kernels = self.table(number(isa))

    @property
    def threads(self) -> int:
        """Number of threads for a kernel call."""
        return usable(self._threads)


class Widened:
    """Mixin for a compiled family: conversions between bfloat16 and float32."""

    threads: int

    def __init__(self, xp: Any, isa: str, threads: int) -> None:
        super().__init__(xp, isa, threads)  # type: ignore[call-arg]  # the family follows
        self._conversions = ElementwiseKernels(number(isa))

    def widened(self, value: Any) -> Any:
        """Return a float32 copy of an array of bfloat16, and other values as they are."""
        if not isinstance(value, np.ndarray) or value.dtype != HALF:
            return value
        copy = np.empty(value.shape, np.float32)
        self._conversions.widen(contiguous(value), copy, False, self.threads)
        return copy

    def narrow(self, value: Array, out: Array) -> None:
        """Round a float32 array into one of bfloat16."""
        self._conversions.narrow(value, out, self.threads)


def through_float32(kernel: Callable[..., None]) -> Callable[..., None]:
    """Decorate a kernel of a `Widened` family: arrays of bfloat16 are copied, and `out` rounded."""

    @wraps(kernel)
    def call(self: Any, *arguments: Any, out: Array, **options: Any) -> None:
        if out.dtype != HALF or not supported(out):
            return kernel(self, *arguments, out=out, **options)
        result = np.empty(out.shape, np.float32)
        kernel(self, *map(self.widened, arguments), out=result, **options)
        self.narrow(result, out)

    return call

"""Backend: one small object per device, with an array module and families of kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import Autotuner
from pydtnn.kernels.reference.family import Array

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
    linear, conv, pool, norm, fused, attention, recurrent, elementwise, loss, update, random
        The families of kernels.
    memory : MemoryPool or None
        The pool of large arrays; None if the array module allocates them.
    keeps_values : bool
        Whether the values of deferred inputs are stored for backward: if convolutions cannot
        evaluate them while reading, storing costs less than a second evaluation.
    gates : bool
        Whether convolutions apply the ReLU mask to the gradient of a deferred input: otherwise the
        layer that deferred it does, in one kernel with the coefficients of batch norm.
    scales : bool
        Whether `update.sgd` and `update.adam` take `scale`, the factor of clipping.
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
    linear: reference.LinearKernels
    conv: reference.ConvKernels
    pool: reference.PoolKernels
    norm: reference.NormKernels
    fused: reference.FusedKernels
    attention: reference.AttentionKernels
    recurrent: reference.RecurrentKernels
    elementwise: reference.ElementwiseKernels
    loss: reference.LossKernels
    update: reference.UpdateKernels
    random: reference.RandomKernels
    memory: Any = None
    keeps_values: bool = False
    gates: bool = True
    scales: bool = False
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

    def clear(self, array: Array) -> None:
        """Set an array to 0; the memory of its whole pages is free until they are written.

        The array is contiguous, of this backend's `zeros`, or a part of such an array. A backend
        without a pool only sets it to 0.
        """
        if hasattr(self.memory, "clear"):
            self.memory.clear(array)
        elif self.has_values:
            array[...] = 0

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

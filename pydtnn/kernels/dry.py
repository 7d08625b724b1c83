"""Backends with kernels that do nothing, to measure the allocations of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import FAMILIES, NormKernels


class Idle:
    """Replacement of a family of kernels: every kernel returns 0 and writes nothing.

    Attributes
    ----------
    geometries : set of ConvGeometry
        Geometries of all convolutions that were called.
    """

    def __init__(self) -> None:
        self.geometries: set[ConvGeometry] = set()

    def __getattr__(self, kernel: str) -> Any:
        return self._idle

    def _idle(self, *arguments: Any, **options: Any) -> float:
        self.geometries.update(a for a in arguments if isinstance(a, ConvGeometry))
        return 0.0


class IdleConv(Idle):
    """Idle convolutions, which compute the sums of norms where those of `conv` do.

    Parameters
    ----------
    conv : Conv
    work_of : callable, optional
        Called with a kernel's name, geometry, batch and dtype: allocates the arrays that the kernel
        of a volume does.
    """

    def __init__(self, conv: Any, work_of: Callable[..., Any] | None) -> None:
        super().__init__()
        self.takes_sums = conv.takes_sums
        self.work_of = work_of

    def __getattr__(self, kernel: str) -> Any:
        return partial(self._idle_conv, kernel)

    def _idle_conv(self, kernel: str, *arguments: Any, **options: Any) -> float:
        geometry = next((a for a in arguments if isinstance(a, ConvGeometry)), None)
        if self.work_of is not None and geometry is not None and len(geometry.size) == 3:
            x = arguments[0]
            if x.dtype.itemsize > 2:  # others run on the reference
                self.work_of(kernel, geometry, len(x), x.dtype)
        return self._idle(*arguments, **options)


class IdleAttention(Idle):
    """Idle kernels of attention.

    Attributes
    ----------
    sizes : set of (int, int)
        Positions, and elements of a head, of all calls of backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, int]] = set()

    def backward(
        self, dy: Any, qkv: Any, y: Any, log_sums: Any, heads: int, **options: Any
    ) -> float:
        """Note the size."""
        _, length, features = y.shape
        self.sizes.add((length, features // heads))
        return 0.0

    def backward_block(
        self, dy: Any, q: Any, kv: Any, y: Any, log_sums: Any, heads: int, at: Any, **options: Any
    ) -> float:
        """Note the size."""
        self.sizes.add((max(q.shape[1], kv.shape[1]), y.shape[2] // heads))
        return 0.0


class IdleRecurrent(Idle):
    """Idle kernels of recurrent layers.

    Attributes
    ----------
    sizes : set of (int, int, int)
        Samples, elements of the state, and gates, of all calls of forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, int, int]] = set()

    def lstm_forward(self, gates: Any, u: Any, b: Any, **options: Any) -> float:
        """Note the size."""
        rows, features = u.shape
        self.sizes.add((len(gates), features, rows // features))
        return 0.0

    gru_forward = lstm_forward


class IdleNorm(Idle):
    """Idle kernels of normalisation; lengths of sums are those of `norm`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        host = NormKernels(np)
        self.sums_length = norm.sums_length
        self.moments, self.constant_sums = host.moments, host.constant_sums


class NoValues(np.ndarray):
    """An array that is never written: to convert it to a number is an error."""

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        code = sys._getframe(1).f_code
        raise ValueError(
            f"{code.co_qualname}: expected a pass without access to values, which arrays do not "
            "have while memory and time are predicted, got one that reads a number; test "
            "`backend.has_values` first"
        )

    __bool__ = __int__ = __index__ = __float__ = __complex__ = _refuse
    item = tolist = _refuse

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write nothing."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self

    def copy(self, order: Any = "C") -> Any:
        """Allocate an array of the same shape."""
        return np.empty_like(self, order=order)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return part if isinstance(part, np.ndarray) else np.asanyarray(part).view(NoValues)


@dataclass(frozen=True)
class DryBackend(Backend):
    """A backend whose arrays have no values."""

    has_values: ClassVar[bool] = False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an array without values."""
        return super().empty(shape, dtype).view(NoValues)

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        """Convert an array or a sequence to an array in C order."""
        return np.asanyarray(value, dtype, order="C")


def dry_backend(backend: Backend, threshold: int) -> Backend:
    """Create a copy of a backend with separate memory and without computation.

    Its arrays have addresses, but are never written, so they use no physical memory.

    Parameters
    ----------
    backend : Backend
    threshold : int
        Minimum bytes of arrays that are allocated from its pool, ``memory``, and counted there.
    """
    from pydtnn.kernels.cpu import MemoryPool
    from pydtnn.kernels.cpu.volumes import work_of

    idle: dict[str, Any] = {family: Idle() for family in FAMILIES}
    idle["attention"] = IdleAttention()
    idle["conv"] = IdleConv(backend.conv, work_of if backend.name == "cpu" else None)
    idle["norm"] = IdleNorm(backend.norm)
    idle["recurrent"] = IdleRecurrent()
    kept: dict[str, Any] = {
        "name": backend.name,
        "threads": backend.threads,
        "isa": backend.isa,
        "autotuner": backend.autotuner,
        "keeps_values": backend.keeps_values,
        "gates": backend.gates,
    }
    return DryBackend(
        xp=np, **kept, **idle, memory=MemoryPool(threshold=threshold, huge_pages=False)
    )


def scratch(backend: Backend, dry: Backend, itemsize: int) -> int:
    """Estimate the maximum scratch memory of kernels of a backend, in bytes.

    Parameters
    ----------
    backend : Backend
    dry : Backend
        Its `dry_backend`, after the dry run.
    itemsize : int
        Bytes of an element.
    """
    if backend.name == "cuda":
        return int(backend.memory.scratch.nbytes)  # the maximum of libraries so far
    if backend.name != "cpu" or itemsize == 2:  # allocations of the reference are not counted
        return 0
    from pydtnn.kernels.cpu.scratch import attention_scratch, conv_scratch, recurrent_scratch

    conv: Any = dry.conv
    attention: Any = dry.attention
    recurrent: Any = dry.recurrent
    winograd, threads = backend.autotuner.mode != "direct", backend.threads
    of_convolutions = conv_scratch(conv.geometries, itemsize, threads, winograd=winograd)
    of_attention = attention_scratch(attention.sizes, itemsize, threads)
    return of_convolutions + of_attention + recurrent_scratch(recurrent.sizes, itemsize)

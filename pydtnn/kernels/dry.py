"""Backends with kernels that do nothing, to measure the allocations of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import FAMILIES, NormKernels


class Idle:
    """Replacement of a family of kernels: every kernel returns 0 and writes nothing.

    Parameters
    ----------
    size_of : callable, optional
        Called with a kernel's name, arguments and options; returns what its scratch memory depends
        on.
    **others
        Attributes that are no kernels.

    Attributes
    ----------
    sizes : set
        Results of `size_of` for all calls.
    """

    def __init__(
        self, size_of: Callable[..., Any] = lambda *call, **options: None, **others: Any
    ) -> None:
        self.sizes: set[Any] = set()
        self._size_of = size_of
        vars(self).update(others)

    def __getattr__(self, kernel: str) -> Any:
        return partial(self._idle, kernel)

    def _idle(self, kernel: str, *arguments: Any, **options: Any) -> float:
        if self._size_of is not None:
            self.sizes |= {self._size_of(kernel, *arguments, **options)} - {None}
        return 0.0


def _attention_size(
    kernel: str, *arguments: Any, kv: Any = None, **options: Any
) -> tuple[int, int] | None:
    """Return positions, and elements of a head, of the kernel of backward."""
    if kernel != "backward":
        return None
    _, q, y, _, heads = arguments
    return max(x.shape[1] for x in (q, kv) if x is not None), y.shape[2] // heads


def _recurrent_size(kernel: str, *arguments: Any, **options: Any) -> tuple[int, int, int] | None:
    """Return samples, elements of the state, and gates, of a kernel of forward."""
    if not kernel.endswith("forward"):
        return None
    (rows, features), samples = arguments[1].shape, len(arguments[0])
    return samples, features, rows // features


def _geometry(kernel: str, *arguments: Any, **options: Any) -> ConvGeometry:
    """Return the geometry of a convolution."""
    geometry: ConvGeometry = next(a for a in arguments if isinstance(a, ConvGeometry))
    return geometry


def _cpu_geometry(kernel: str, *arguments: Any, **options: Any) -> ConvGeometry:
    """Return the geometry, and allocate the arrays that the compiled kernel of a volume does."""
    from pydtnn.kernels.cpu.volumes import work_of

    geometry, x = _geometry(kernel, *arguments), arguments[0]
    if len(geometry.size) == 3 and x.dtype.itemsize > 2:  # others run on the reference
        work_of(kernel, geometry, len(x), x.dtype)
    return geometry


MANY = 256
"""Elements of arrays that are not computed with."""


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

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Allocate the result of an operation on elements, of long arrays without its values."""
        if method == "reduce" and self._is_plain(options):
            few = self[(slice(1),) * self.ndim].view(np.ndarray)
            shape = np.moveaxis(self, options["axis"], 0).shape[1:]
            whole = np.empty(shape, ufunc.reduce(few, **options).dtype).view(NoValues)
            return np.expand_dims(whole, options["axis"]) if options.get("keepdims") else whole
        if method != "__call__" or ufunc.nout > 1 or self.size < MANY or "where" in options:
            plain = [x.view(np.ndarray) if isinstance(x, NoValues) else x for x in inputs]
            out = options.pop("out", ())
            if out:
                options["out"] = tuple(map(np.asarray, out))
            found = getattr(ufunc, method)(*plain, **options)
            if out:
                return out[0] if len(out) == 1 else out
            if isinstance(found, tuple):
                return tuple(np.asarray(array).view(NoValues) for array in found)
            return np.asarray(found).view(NoValues)
        if "out" in options:
            return options["out"][0]
        few = (x[(slice(1),) * x.ndim].view(np.ndarray) if np.ndim(x) else x for x in inputs)
        dtype = ufunc(*few, **options).dtype
        return np.empty(np.broadcast_shapes(*map(np.shape, inputs)), dtype).view(NoValues)

    def _is_plain(self, options: Mapping[str, Any]) -> bool:
        """Return whether options of a reduction have one axis, and all elements of a long array."""
        known = {*options} <= {"axis", "dtype", "keepdims", "where"}
        every = known and options.get("where", True) is True
        return every and isinstance(options.get("axis"), int) and self.size >= MANY

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        """Allocate the result of a concatenation."""
        axis = options.get("axis", 0) if len(given) < 2 else given[1]
        if function is not np.concatenate or {*options} - {"axis"} or not isinstance(axis, int):
            return super().__array_function__(function, types, given, options)
        arrays = given[0]
        shape = [*np.shape(arrays[0])]
        shape[axis] = sum(np.shape(one)[axis] for one in arrays)
        return np.empty(shape, np.result_type(*arrays)).view(NoValues)

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """Allocate an array of another shape if it is no view."""
        if self.flags.c_contiguous or self.size < MANY:
            return super().reshape(*shape, **options)
        sizes = list(shape[0] if isinstance(shape[0], tuple | list) else shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // -int(np.prod(sizes))
        return np.empty(sizes, self.dtype).view(NoValues)

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

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an array, without its zeros."""
        return super().empty(shape, dtype)

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

    host = NormKernels(np)
    sums: dict[str, Any] = {
        "sums_length": backend.norm.sums_length,
        "constant_sums": host.constant_sums,
    }
    geometry_of = _cpu_geometry if backend.name == "cpu" else _geometry
    idle: dict[str, Any] = {family: Idle() for family in FAMILIES}
    idle["attention"] = Idle(_attention_size)
    idle["conv"] = Idle(geometry_of, takes_sums=backend.conv.takes_sums)
    idle["norm"] = Idle(moments=host.moments, **sums)
    idle["recurrent"] = Idle(_recurrent_size)
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

    sizes: Any = {name: getattr(dry, name).sizes for name in ("attention", "conv", "recurrent")}
    winograd, threads = backend.autotuner.mode != "direct", backend.threads
    of_convolutions = conv_scratch(sizes["conv"], itemsize, threads, winograd=winograd)
    of_attention = attention_scratch(sizes["attention"], itemsize, threads)
    return of_convolutions + of_attention + recurrent_scratch(sizes["recurrent"], itemsize)

"""Arrays of the device, as strict as CuPy's: host arrays do not mix, nothing is read unasked."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.simulated.cupy.memory import Block, MemoryPointer, pinned
from tests.simulated.cupy.streams import Stream

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy


class DeviceArray(NDArrayOperatorsMixin):
    """``cupy.ndarray``; each device has a class of its own, whose `xp` is the module.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype
    memptr : MemoryPointer, optional
        Where the elements are; by default in new memory.
    strides : tuple of int, optional
    order : str
    """

    xp: ClassVar[SimulatedCupy]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        pointer = self.xp.cuda.alloc(size) if memptr is None else memptr
        extent = size
        if strides is not None:
            extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        buffer = pointer.bytes(extent if size else 0)
        self._lease = pointer.mem
        self.memory = np.ndarray(shape, dtype, buffer, 0, strides, order)  # type: ignore[arg-type]

    @classmethod
    def _view(cls, lease: Any, memory: np.ndarray) -> DeviceArray:
        """Wrap a part of memory that is there."""
        array = cls.__new__(cls)
        array._lease, array.memory = lease, memory
        return array

    @property
    def block(self) -> Block:
        return self._lease.block

    def viewing(self, memory: np.ndarray) -> DeviceArray:
        """Wrap what NumPy makes of our memory without a copy."""
        return self._view(self._lease, memory)

    # -- what is known at once --------------------------------------------------------------------

    shape = property(lambda self: self.memory.shape)
    ndim = property(lambda self: self.memory.ndim)
    size = property(lambda self: self.memory.size)
    dtype = property(lambda self: self.memory.dtype)
    itemsize = property(lambda self: self.memory.itemsize)
    nbytes = property(lambda self: self.memory.nbytes)
    strides = property(lambda self: self.memory.strides)
    flags = property(lambda self: self.memory.flags)
    T = property(lambda self: self.viewing(self.memory.T))

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._lease, self.memory.ctypes.data - self._lease.ptr)

    @property
    def device(self) -> Any:
        return self.xp.cuda.Device()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.memory.ctypes.data if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": 1,
            "version": 3,
        }

    def __len__(self) -> int:
        return len(self.memory)

    # -- never by itself --------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        function = self.xp.function(ufunc.__name__)
        if method != "__call__" or function is None:
            return NotImplemented
        return function(*inputs, **options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        function = self.xp.function(func.__name__) if func.__module__ == "numpy" else None
        return NotImplemented if function is None else function(*args, **options)

    # -- copies to and from the host --------------------------------------------------------------

    def get(
        self,
        stream: Stream | None = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        stream = stream or self.xp.current
        host = np.empty(self.shape, self.dtype) if out is None else out
        if host.shape != self.shape or host.dtype != self.dtype or not host.flags.c_contiguous:
            raise ValueError(f"get: out must be a contiguous array of {self.dtype} {self.shape}")
        there = pinned(host)
        if blocking or there is None:  # CUDA copies to memory that can be paged before it returns
            self.xp.host_waits("a copy to the host")
        here = self.memory
        into = host if there is None else there
        stream.put(lambda: np.copyto(into, here), [self.block])
        if blocking or there is None:
            mark = stream.record().mark
            self.xp.fabric.wait(self.xp, lambda: mark.done)
        return host

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be set, not {type(arr)}")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"set: {self.dtype} {self.shape} cannot take {arr.dtype} {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        there = pinned(arr) if arr.flags.c_contiguous else None
        if there is None:
            self.xp.uploads("set")
            there = arr.copy()
        source, here = there, self.memory
        (stream or self.xp.current).put(lambda: np.copyto(here, source), [self.block])

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return self.get().__index__()

    def __repr__(self) -> str:
        where = f"on the simulated device at {self.memory.ctypes.data:#x}"
        return f"<array {self.dtype} {self.shape} {where}>"  # a debugger must not make it wait

    # -- parts and other shapes -------------------------------------------------------------------

    def __getitem__(self, where: Any) -> DeviceArray:
        return self.xp.take_part(self, where)

    def __setitem__(self, where: Any, value: Any) -> None:
        self.xp.put_part(self, where, value)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def view(self, dtype: Any = None) -> DeviceArray:
        return self.viewing(self.memory.view() if dtype is None else self.memory.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> DeviceArray:
        return self.xp.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def ravel(self, order: str = "C") -> DeviceArray:
        return self.xp.reshape(self, (-1,), order=order)

    def flatten(self, order: str = "C") -> DeviceArray:
        return self.copy(order).reshape(-1)

    def transpose(self, *axes: Any) -> DeviceArray:
        return self.viewing(self.memory.transpose(*axes))

    def swapaxes(self, one: int, other: int) -> DeviceArray:
        return self.viewing(self.memory.swapaxes(one, other))

    def squeeze(self, axis: Any = None) -> DeviceArray:
        return self.viewing(self.memory.squeeze(axis))

    # -- new arrays -------------------------------------------------------------------------------

    def copy(self, order: str = "C") -> DeviceArray:
        return self.xp.array(self, order=order)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> DeviceArray:
        return self.copy()

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> DeviceArray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return self.xp.array(self, dtype, order=order)

    def fill(self, value: Any) -> None:
        self[...] = value

    def clip(self, low: Any = None, high: Any = None, out: Any = None) -> DeviceArray:
        return self.xp.clip(self, low, high, out=out)

    def dot(self, b: Any, out: Any = None) -> DeviceArray:
        return self.xp.dot(self, b, out=out)

    def nonzero(self) -> Any:
        return self.xp.nonzero(self)


def _method(name: str) -> Any:
    def method(self: DeviceArray, *args: Any, **options: Any) -> Any:
        return getattr(self.xp, name)(self, *args, **options)

    method.__name__ = name
    return method


REDUCTIONS = (
    *("all", "any", "argmax", "argmin", "argsort", "cumsum", "cumprod", "max", "mean", "min"),
    *("prod", "repeat", "round", "std", "sum", "take", "var"),
)
for name in REDUCTIONS:
    setattr(DeviceArray, name, _method(name))

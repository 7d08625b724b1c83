"""The module `cupy` of a device that is none."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.simulated.cupy import functions, indexing
from tests.simulated.cupy.array import DeviceArray
from tests.simulated.cupy.cuda import Cuda
from tests.simulated.cupy.fabric import Fabric
from tests.simulated.cupy.memory import Block, MemoryPool
from tests.simulated.cupy.streams import Stream

HERE = Path(__file__).parent.parent

MADE_HERE = (
    *("arange", "array", "asarray", "ascontiguousarray", "asnumpy", "copyto", "empty"),
    *("empty_like", "eye", "full", "full_like", "get_default_memory_pool", "may_share_memory"),
    *("ones", "ones_like", "shares_memory", "zeros", "zeros_like"),
)
"""Functions of CuPy that are methods below."""


class Seen:
    """What happened on a device meanwhile, each with where it was asked for.

    Attributes
    ----------
    waits : list of str
        The host waited for the device.
    uploads : list of str
        An array of the host was copied to the device from memory that can be paged.
    allocations : list of str
        Memory came from the driver.
    pooled : list of str
        Memory came from a pool.
    launches : int
        Pieces of work that were enqueued or captured.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self.allocations: list[str] = []
        self.pooled: list[str] = []
        self.launches = 0


class SimulatedCupy:
    """One rank's device, and the module that its arrays come from.

    Parameters
    ----------
    fabric : Fabric, optional
        Shared by the ranks of a group of threads.
    seed : int
        Of the order in which streams take turns.
    eager : bool
        Whether work is carried out as soon as it can be.
    """

    __name__ = "cupy"
    __version__ = "14.2.0"

    def __init__(self, fabric: Fabric | None = None, seed: int = 0, *, eager: bool = False) -> None:
        self.fabric = fabric or Fabric()
        self.fabric.devices.append(self)
        self.random = random.Random(seed)
        self.eager = eager
        self.gpu = 0
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self._watching: list[Seen] = []
        self.cuda = Cuda(self)
        self.ndarray: Any = type("ndarray", (DeviceArray,), {"xp": self})
        self._functions = self._all_functions()

    def _all_functions(self) -> dict[str, Any]:
        made: dict[str, Any] = {name: getattr(np, name) for name in functions.OF_THE_HOST}
        for names, make in (
            (functions.COMPUTED, functions.Function),
            (functions.VIEWED, functions.viewed),
            (functions.KNOWN_AT_ONCE, functions.known_at_once),
            (functions.SHAPED_BY_VALUES, functions.shaped_by_values),
        ):
            made |= {name: make(self, name) for name in names}
        return made | {name: getattr(self, name) for name in MADE_HERE}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._functions:
            raise AttributeError(
                f"the simulated cupy has no {name}; CuPy may have, see functions.py"
            )
        return self._functions[name]

    def function(self, name: str) -> Callable[..., Any] | None:
        """What NumPy's function of this name is for arrays of the device, if CuPy has it."""
        return self._functions.get(name)

    # -- work -------------------------------------------------------------------------------------

    def put(self, call: Callable[[], object], blocks: Iterable[Block] = ()) -> None:
        """Enqueue a call on the current stream."""
        for seen in self._watching:
            seen.launches += 1
        self.current.put(call, list(blocks))

    def run(self) -> bool:
        """Let one stream, drawn at random, do one piece of work."""
        streams = self.random.sample(self.streams, len(self.streams))
        return any(stream.run() for stream in streams)

    def advance(self) -> None:
        """Do what can be done, if nobody is to wait for it."""
        if self.eager:
            with self.fabric.lock:
                while self.run():
                    pass

    def drain(self, what: str) -> None:
        """Wait for all streams."""
        self.host_waits(what)
        self.fabric.wait(self, lambda: not any(stream.work for stream in self.streams))

    def described(self) -> str:
        """Say which streams have work."""
        return ", ".join(f"{len(s.work)} on {s.ptr}" for s in self.streams if s.work) or "idle"

    # -- who does what ----------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Note what happens meanwhile."""
        seen = Seen()
        self._watching.append(seen)
        try:
            yield seen
        finally:
            self._watching.remove(seen)

    def saw(self, what: str, detail: str) -> None:
        for seen in self._watching:
            getattr(seen, what).append(f"{asked_for()}: {detail}")

    def host_waits(self, what: str) -> None:
        """Note that the host waits, which a capture forbids."""
        if self.current.capture is not None:
            self.current.forbid()
        self.saw("waits", what)

    def uploads(self, what: str) -> None:
        """Note a copy of a host array; a graph would read it again where it lay."""
        if self.current.capture is not None:
            self.current.forbid("a host array cannot be brought to the device inside a capture")
        self.saw("uploads", what)

    # -- arrays -----------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
        return self.ndarray(shape, dtype, order=order)

    def full(self, shape: Any, value: Any, dtype: Any = None, order: str = "C") -> DeviceArray:
        array = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype, order)
        array[...] = value
        return array

    def zeros(self, shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
        return self.full(shape, 0, dtype, order)

    def ones(self, shape: Any, dtype: Any = float, order: str = "C") -> DeviceArray:
        return self.full(shape, 1, dtype, order)

    def empty_like(self, a: DeviceArray, dtype: Any = None, shape: Any = None) -> DeviceArray:
        functions.refuse_others(self, [a])
        return self.empty(a.shape if shape is None else shape, dtype or a.dtype)

    def full_like(
        self, a: DeviceArray, value: Any, dtype: Any = None, shape: Any = None
    ) -> DeviceArray:
        array = self.empty_like(a, dtype, shape)
        array[...] = value
        return array

    def zeros_like(self, a: DeviceArray, dtype: Any = None, shape: Any = None) -> DeviceArray:
        return self.full_like(a, 0, dtype, shape)

    def ones_like(self, a: DeviceArray, dtype: Any = None, shape: Any = None) -> DeviceArray:
        return self.full_like(a, 1, dtype, shape)

    def arange(self, *limits: Any, dtype: Any = None) -> DeviceArray:
        return self._made_of(np.arange(*limits, dtype=dtype))

    def eye(self, n: int, m: int | None = None, k: int = 0, dtype: Any = float) -> DeviceArray:
        return self._made_of(np.eye(n, m, k, dtype))

    def array(
        self, value: Any, dtype: Any = None, copy: bool = True, order: str = "K"
    ) -> DeviceArray:
        if not isinstance(value, DeviceArray):
            if any(isinstance(leaf, DeviceArray) for leaf in functions.leaves(value)):
                raise TypeError("use stack to make an array of arrays of the device")
            host = np.array(value, dtype, order="C" if order in "KA" else order)  # type: ignore[call-overload]
            self.uploads(f"{host.dtype} {host.shape}")
            return self._made_of(host)
        dtype = value.dtype if dtype is None else np.dtype(dtype)
        layout = np.empty_like(functions.outline_of(value), dtype, order=order)  # type: ignore[call-overload]
        if order == "K":
            layout = np.empty_like(value.memory, dtype, order="K")
        if not copy and dtype == value.dtype and self._in_order(value, order):
            return value
        functions.refuse_others(self, [value])
        result = self.ndarray(value.shape, dtype, strides=layout.strides if value.size else None)
        result[...] = value
        return result

    @staticmethod
    def _in_order(array: DeviceArray, order: str) -> bool:
        flags = array.flags
        return {"C": flags.c_contiguous, "F": flags.f_contiguous}.get(order, True)

    def asarray(self, value: Any, dtype: Any = None, order: str | None = None) -> DeviceArray:
        return self.array(value, dtype, copy=False, order=order or "K")

    def ascontiguousarray(self, value: Any, dtype: Any = None) -> DeviceArray:
        array = self.array(value, dtype, copy=False, order="C")
        return array if array.ndim else array.reshape(1)

    def _made_of(self, host: np.ndarray) -> DeviceArray:
        """Let a kernel write values that are nobody else's."""
        array = self.empty(host.shape, host.dtype, "F" if host.flags.fnc else "C")
        target = array.memory
        self.put(lambda: np.copyto(target, host), [array.block])
        return array

    def copyto(self, into: DeviceArray, value: Any) -> None:
        into[...] = value

    def asnumpy(
        self,
        a: Any,
        stream: Stream | None = None,
        order: str = "C",
        out: np.ndarray | None = None,
        *,
        blocking: bool = True,
    ) -> np.ndarray:
        if isinstance(a, DeviceArray):
            return a.get(stream, order, out, blocking)
        return np.array(a, order=order)  # type: ignore[call-overload]

    def may_share_memory(self, a: DeviceArray, b: DeviceArray) -> bool:
        return np.may_share_memory(a.memory, b.memory)

    shares_memory = may_share_memory

    def get_default_memory_pool(self) -> MemoryPool:
        return self.cuda.allocators.default

    def take_part(self, array: DeviceArray, where: Any) -> DeviceArray:
        return indexing.take_part(self, array, where)

    def put_part(self, array: DeviceArray, where: Any, value: Any) -> None:
        indexing.put_part(self, array, where, value)


def asked_for() -> str:
    """Name the line that asked, outside of the simulation and NumPy: "norm.py:92"."""
    for frame in reversed(traceback.extract_stack(limit=30)):
        path = Path(frame.filename)
        ours = HERE in path.parents and not path.name.startswith("test_")
        if not ours and "numpy" not in path.parts:
            return f"{path.name}:{frame.lineno}"
    return "?"

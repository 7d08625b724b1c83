"""A device that is none: streams, events, pinned memory and NCCL as CuPy shows them, in NumPy.

It is meaner than a GPU. Nothing on a stream runs before somebody asks an event or waits, streams
then take turns in an order drawn at random, and memory that is given back is overwritten at once.
So work that is not put in order by events reads what it should not, and the test fails.

Every rank of a group of threads makes its own `FakeCupy`; their NCCLs meet in one `Fabric`.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[], bool]
"""Does something, or returns False where it must be tried again later."""

PATIENCE = 30.0  # s without progress, after which a test is told that it hangs


class Stream:
    """Work in order; none of it runs by itself."""

    def __init__(self, device: FakeCupy) -> None:
        self.device = device
        self.work: deque[Work] = deque()
        self.ptr = 1000 + len(device.streams)
        self.capturing = False
        device.streams.append(self)

    def put(self, call: Callable[[], object]) -> None:
        self.work.append(lambda: (call(), True)[1])

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        mark = event.mark = SimpleNamespace(done=False)
        self.put(lambda: setattr(mark, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        mark = event.mark
        self.work.append(lambda: mark.done)

    def synchronize(self) -> None:
        self.record().synchronize()

    def is_capturing(self) -> bool:
        return self.capturing

    def begin_capture(self) -> None:
        self.capturing, self.broken = True, ""
        self.before, self.work = self.work, deque()

    def end_capture(self) -> Graph:
        graph, self.work = Graph(list(self.work)), self.before
        self.capturing = False
        if self.broken:
            raise RuntimeError(self.broken)
        return graph

    def __enter__(self) -> Stream:
        self.outside, self.device.current = self.device.current, self
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current = self.outside

    def run(self) -> bool:
        """Do the next piece of work, if it can be done."""
        if self.capturing or not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class Graph:
    """Captured work, which can be put on a stream any number of times."""

    def __init__(self, work: list[Work]) -> None:
        self.work = work

    def launch(self, stream: Stream) -> None:
        stream.work.extend(self.work)


class Event:
    """A place in a stream. One that was never recorded has happened."""

    def __init__(self, device: FakeCupy) -> None:
        self.device = device
        self.mark = SimpleNamespace(done=True)

    @property
    def done(self) -> bool:
        if self.device.current.capturing:
            raise RuntimeError("an event of a capture cannot be asked")
        for _ in range(self.device.random.randrange(3)):
            self.device.run()
        return self.mark.done

    def synchronize(self) -> None:
        if self.device.current.capturing:
            self.device.current.broken = "operation not permitted when stream is capturing"
            raise RuntimeError(self.device.current.broken)
        began = time.monotonic()
        while not self.mark.done:
            if self.device.run():
                began = time.monotonic()
            elif time.monotonic() - began > PATIENCE:
                raise RuntimeError("the fake device hangs: no stream can go on")
            else:
                time.sleep(1e-5)  # another rank must come first


class Array:
    """A flat array of the fake device; NumPy may not touch it, as it may not touch CuPy's."""

    __array_ufunc__ = None

    def __init__(self, device: FakeCupy, memory: np.ndarray) -> None:
        self.device, self.memory = device, memory
        self.shape, self.ndim, self.size = memory.shape, memory.ndim, memory.size
        self.dtype, self.itemsize, self.nbytes = memory.dtype, memory.itemsize, memory.nbytes
        self.strides = memory.strides
        self.flags = SimpleNamespace(c_contiguous=memory.flags.c_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self.memory.ctypes.data if self.nbytes else 0, not self.memory.flags.writeable
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, where: Any) -> Array:
        return Array(self.device, self.memory[where])

    def __setitem__(self, where: Any, value: Array) -> None:
        into = self.memory[where]
        self.device.current.put(lambda: np.copyto(into, value.memory))

    def view(self, dtype: Any) -> Array:
        return Array(self.device, self.memory.view(dtype))

    def change(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Enqueue a kernel that replaces the values."""

        def kernel() -> None:
            self.memory[...] = function(self.memory)

        self.device.current.put(kernel)

    def get(
        self, stream: Stream | None = None, out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        stream = stream or self.device.current
        host = np.empty_like(self.memory) if out is None else out
        there, here = raw(host), raw(self.memory)
        stream.put(lambda: np.copyto(there, here))
        if blocking:
            stream.synchronize()
        return host

    def set(self, host: np.ndarray, stream: Stream | None = None) -> None:
        there, here = raw(host), raw(self.memory)
        (stream or self.device.current).put(lambda: np.copyto(here, there))


def raw(host: np.ndarray) -> np.ndarray:
    """View memory by its address: as in CUDA, a copy under way does not keep it alive."""
    if not host.nbytes:
        return np.empty_like(host)
    block = (ctypes.c_ubyte * host.nbytes).from_address(host.ctypes.data)
    return np.frombuffer(block, np.uint8).view(host.dtype).reshape(host.shape)


class FakeCupy:
    """What of CuPy's module is used: arrays, streams, events, pinned memory, NCCL."""

    def __init__(self, fabric: Fabric, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: Stream(self),
            Event=lambda disable_timing: Event(self),
            Device=lambda number: SimpleNamespace(use=lambda: None, pci_bus_id=f"{number:04x}"),
            get_current_stream=lambda: self.current,
            alloc_pinned_memory=pinned,
            nccl=FakeNccl(self, fabric),
            runtime=SimpleNamespace(getDeviceCount=lambda: fabric.gpus),
        )

    def run(self) -> bool:
        """Let one stream, drawn at random, do one piece of work."""
        streams = self.random.sample(self.streams, len(self.streams))
        return any(stream.run() for stream in streams)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate from a pool: freed memory is used again by what the stream is given next."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory, stream = np.full(size, 0xCD, np.uint8), self.current
        owner = memory.view(_Owned)
        weakref.finalize(owner, stream.put, lambda: _spoil(memory))
        return Array(self, np.frombuffer(memoryview(owner), np.uint8).view(dtype).reshape(shape))

    def asarray(self, host: np.ndarray) -> Array:
        array, values = self.empty(host.shape, host.dtype), host.copy()
        array.change(lambda old: values)
        return array


def pinned(size: int) -> memoryview:
    """Memory that is overwritten as soon as nobody holds it."""
    block = (ctypes.c_ubyte * size)()
    memory = np.frombuffer(block, np.uint8)
    owner = memory.view(_Owned)
    weakref.finalize(owner, _spoil, memory)
    return memoryview(owner)


class _Owned(np.ndarray):
    """A view that can be watched by a weak reference."""


def _spoil(memory: np.ndarray) -> None:
    memory[...] = 0xEE
    GIVEN_BACK.append(memory)


GIVEN_BACK: list[np.ndarray] = []
"""Memory that must not vanish, so that who still reads it finds nonsense instead of nothing."""


class Fabric:
    """Where the operations of all ranks' NCCLs meet."""

    def __init__(self, gpus: int = 8) -> None:
        self.gpus = gpus
        self.lock = threading.Lock()
        self.groups = 0
        self.meetings: dict[tuple[int, int], dict[int, Any]] = {}

    def bring(self, key: tuple[int, int], rank: int, what: tuple, value: Any) -> None:
        with self.lock:
            self.meetings.setdefault(key, {})[rank] = (what, value)

    def all(self, key: tuple[int, int], size: int) -> list[Any] | None:
        """What all ranks have brought; None until the last has come."""
        with self.lock:
            here = self.meetings[key]
            if len(here) < size:
                return None
            calls = {what for what, _ in here.values()}
            assert len(calls) == 1, f"ranks make different calls of NCCL: {calls}"
            return [here[rank][1] for rank in range(size)]


class FakeNccl:
    """The module ``cupy.cuda.nccl``."""

    def __init__(self, device: FakeCupy, fabric: Fabric) -> None:
        self.device, self.fabric = device, fabric
        self.available = True
        self.group: list[tuple[int, Work]] | None = None

    def get_version(self) -> int:
        return 22800

    def get_unique_id(self) -> tuple[int, ...]:
        with self.fabric.lock:
            self.fabric.groups += 1
            return (self.fabric.groups,) * 128

    def groupStart(self) -> None:
        assert self.group is None
        self.group = []

    def groupEnd(self) -> None:
        assert self.group is not None
        parts, self.group = self.group, None
        streams = {stream for stream, _ in parts}
        assert len(streams) <= 1
        waiting = [work for _, work in parts]

        def progress() -> bool:
            waiting[:] = [work for work in waiting if not work()]
            return not waiting

        if parts:
            self.stream(streams.pop()).work.append(progress)

    def enqueue(self, stream: int, work: Work) -> None:
        if self.group is not None:
            self.group.append((stream, work))
        else:
            self.stream(stream).work.append(work)

    def stream(self, ptr: int) -> Stream:
        return next(stream for stream in self.device.streams if stream.ptr == ptr)

    def NcclCommunicator(self, size: int, unique: tuple[int, ...], rank: int) -> FakeGroup:
        return FakeGroup(self, size, unique[0], rank)


TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
OPERATIONS = {0: np.add, 2: np.maximum, 3: np.minimum}


class FakeGroup:
    """``cupy.cuda.nccl.NcclCommunicator``: pointers, counts and numbers of types, as in C."""

    def __init__(self, nccl: FakeNccl, size: int, number: int, rank: int) -> None:
        self.nccl, self.size, self.number, self.rank = nccl, size, number, rank
        self.calls = 0

    def meet(
        self, what: tuple, source: np.ndarray, finish: Callable[[list[Any]], None], stream: int
    ) -> None:
        """Enqueue: read `source`, wait for all ranks, then `finish`."""
        self.calls += 1
        key, fabric, brought = (self.number, self.calls), self.nccl.fabric, []

        def work() -> bool:
            if not brought:
                fabric.bring(key, self.rank, what, source.copy())
                brought.append(True)
            values = fabric.all(key, self.size)
            if values is not None:
                finish(values)
            return values is not None

        self.nccl.enqueue(stream, work)

    def allReduce(self, source, out, count, dtype, op, stream):
        def finish(values: list[Any]) -> None:
            at(out, count, dtype)[...] = reduced(values, op)

        self.meet(("allReduce", count, dtype, op), at(source, count, dtype), finish, stream)

    def reduce(self, source, out, count, dtype, op, root, stream):
        def finish(values: list[Any]) -> None:
            if self.rank == root:
                at(out, count, dtype)[...] = reduced(values, op)

        self.meet(("reduce", count, dtype, op, root), at(source, count, dtype), finish, stream)

    def broadcast(self, source, out, count, dtype, root, stream):
        def finish(values: list[Any]) -> None:
            at(out, count, dtype)[...] = values[root]

        self.meet(("broadcast", count, dtype, root), at(source, count, dtype), finish, stream)

    def reduceScatter(self, source, out, count, dtype, op, stream):
        def finish(values: list[Any]) -> None:
            whole = reduced(values, op)
            at(out, count, dtype)[...] = whole[self.rank * count : (self.rank + 1) * count]

        whole = at(source, count * self.size, dtype)
        self.meet(("reduceScatter", count, dtype, op), whole, finish, stream)

    def allGather(self, source, out, count, dtype, stream):
        def finish(values: list[Any]) -> None:
            at(out, count * self.size, dtype)[...] = np.concatenate(values)

        self.meet(("allGather", count, dtype), at(source, count, dtype), finish, stream)


def at(pointer: int, count: int, dtype: int) -> np.ndarray:
    """View memory as an array."""
    kind = np.dtype(TYPES[dtype])
    if not count:
        return np.empty(0, kind)
    block = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(pointer)
    return np.frombuffer(block, kind)


def reduced(values: list[Any], op: int) -> Any:
    total = values[0].copy()
    for value in values[1:]:
        total = OPERATIONS[op](total, value)
    return total

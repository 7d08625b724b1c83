"""Memory of the device from pools, and pinned memory of the host.

As in CuPy's pools, memory that nobody holds any more goes to the next who asks on the same stream,
at once: what the stream does later comes after what it was given before. So the next work that the
stream is given begins by overwriting it with NaN. Work that is enqueued does not keep memory alive.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy
    from tests.simulated.cupy.streams import Stream

GRAIN = 512  # bytes; all blocks are multiples
NAN = 0xFF  # every byte of memory that is nobody's: NaN of each type


class Block:
    """Memory as the driver gives it (``cupy.cuda.Memory``); aligned as GPU memory is."""

    def __init__(self, size: int) -> None:
        whole = np.full(size + GRAIN, NAN, np.uint8)
        start = -whole.ctypes.data % GRAIN
        self.bytes = whole[start : start + size]
        self.size = size
        self.ptr = self.bytes.ctypes.data
        self.returned = False  # to the driver: whoever touches it then has an invalid address

    @property
    def block(self) -> Block:
        return self

    def spoil(self) -> None:
        self.bytes.fill(NAN)


class Lease:
    """The right to use a block; with the last reference to it the block goes back to its pool."""

    def __init__(self, source: MemoryPointer) -> None:
        self.source = source
        self.block: Block = source.mem.block
        self.ptr, self.size = self.block.ptr, self.block.size


class MemoryPointer:
    """An address in memory that is kept alive (``cupy.cuda.MemoryPointer``)."""

    def __init__(self, mem: Block | Lease, offset: int) -> None:
        self.mem, self._offset = mem, offset
        self.ptr = mem.ptr + offset
        self.device_id = 0

    def __add__(self, bytes_: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self._offset + bytes_)

    def bytes(self, size: int) -> np.ndarray:
        """View what begins here. That keeps memory from vanishing, but not from being reused."""
        assert self._offset + size <= self.mem.size, "beyond the end of an allocation"
        return self.mem.block.bytes[self._offset : self._offset + size]


Allocator = Callable[[int], MemoryPointer]


class MemoryPool:
    """``cupy.cuda.MemoryPool``: blocks wait by stream and size for who asks next."""

    def __init__(self, device: SimulatedCupy, allocator: Allocator | None = None) -> None:
        self.device = device
        self._allocator = allocator or device.cuda.driver_malloc
        self._free: dict[tuple[Stream, int], list[MemoryPointer]] = {}
        self._total = self._used = 0

    def malloc(self, size: int) -> MemoryPointer:
        stream, size = self.device.current, -(-max(size, 1) // GRAIN) * GRAIN
        waiting = self._free.get((stream, size))
        if waiting:
            memory = waiting.pop()
        else:
            memory = self._allocator(size)
            self._total += size
        self.device.saw("pooled", f"{size} bytes")
        self._used += size
        lease = Lease(memory)
        made_in = stream.capture
        weakref.finalize(lease, self._take_back, memory, stream, made_in).atexit = False
        return MemoryPointer(lease, 0)

    def _take_back(self, memory: MemoryPointer, stream: Stream, made_in: Any) -> None:
        block = memory.mem.block
        # each replay overwrites what the capture made and gave back, nothing else
        stream.given_back.append((block, made_in if stream.capture is made_in else None))
        self._used -= block.size
        self._free.setdefault((stream, block.size), []).append(memory)

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        """Return what nobody holds to the driver, which waits until all work is done."""
        if self._free:
            self.device.drain("cudaFree")
        for key in list(self._free):
            if stream is None or key[0] is stream:
                for memory in self._free.pop(key):
                    self._total -= memory.mem.size
                    memory.mem.block.returned = True

    def used_bytes(self) -> int:
        return self._used

    def total_bytes(self) -> int:
        return self._total


class Allocators:
    """Which pool arrays come from: the default one, or that of the innermost context."""

    def __init__(self, device: SimulatedCupy) -> None:
        self.default = MemoryPool(device)
        self.current: Allocator = self.default.malloc

    @contextmanager
    def using(self, allocator: Allocator | None = None) -> Iterator[None]:
        outside, self.current = self.current, allocator or self.default.malloc
        try:
            yield
        finally:
            self.current = outside


# -- memory of the host ---------------------------------------------------------------------------

_STARTS: list[int] = []
_PINNED: dict[int, np.ndarray] = {}
_CHANGING = threading.RLock()
"""Ranks are threads; and whoever allocates may meet a finalizer."""


class _Owned(np.ndarray):
    """A view that can be watched by a weak reference."""


def alloc_pinned_memory(size: int) -> memoryview:
    """Page-locked memory, which is overwritten as soon as nobody holds it."""
    memory: Any = np.full(max(size, 1), NAN, np.uint8)
    owner = memory.view(_Owned)
    start = memory.ctypes.data
    with _CHANGING:
        bisect.insort(_STARTS, start)
        _PINNED[start] = memory
    weakref.finalize(owner, _release, start).atexit = False
    return memoryview(owner)


def _release(start: int) -> None:
    with _CHANGING:
        _PINNED.pop(start).fill(NAN)
        _STARTS.remove(start)


def pinned(host: np.ndarray) -> np.ndarray | None:
    """View an array of pinned memory without keeping it; None where memory can be paged.

    As in CUDA, a copy under way does not keep its memory alive.
    """
    address = host.ctypes.data
    with _CHANGING:
        position = bisect.bisect_right(_STARTS, address) - 1
        if not host.nbytes or position < 0:
            return None
        start = _STARTS[position]
        memory = _PINNED[start]
    begin = address - start
    if begin + host.nbytes > memory.nbytes:
        return None
    return memory[begin : begin + host.nbytes].view(host.dtype).reshape(host.shape)


def raw(address: int, size: int) -> np.ndarray:
    """View memory by its address alone, as C does."""
    if not size:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    return np.frombuffer(memory, np.uint8)

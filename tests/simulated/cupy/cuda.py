"""``cupy.cuda``, as far as pydtnn uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tests.simulated.cupy import memory, streams
from tests.simulated.cupy.memory import Allocator, Allocators, Block, alloc_pinned_memory
from tests.simulated.cupy.nccl import Nccl

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy

CUDA = 13000


class CUDARuntimeError(RuntimeError):
    """Nothing here raises it."""

    status = 0


class Gpu:
    """``cupy.cuda.Device``."""

    def __init__(self, xp: SimulatedCupy, number: int | None = None) -> None:
        self._xp = xp
        self.id = xp.gpu if number is None else number
        self.compute_capability = "90"
        self.pci_bus_id = f"{self.id:04x}"

    def use(self) -> None:
        self._xp.gpu = self.id

    def synchronize(self) -> None:
        self._xp.drain("a device")


class Cuda:
    """The module ``cupy.cuda`` of a device."""

    MemoryPointer = memory.MemoryPointer

    def __init__(self, xp: SimulatedCupy) -> None:
        self._xp = xp
        self.nccl = Nccl(xp)
        self.runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: xp.fabric.gpus,
            getDeviceProperties=lambda number: {"name": b"simulated device"},
            runtimeGetVersion=lambda: CUDA,
            driverGetVersion=lambda: CUDA,
        )

    @cached_property
    def allocators(self) -> Allocators:
        return Allocators(self._xp)

    def is_available(self) -> bool:
        return True

    def Device(self, number: int | None = None) -> Gpu:
        return Gpu(self._xp, number)

    def Stream(self, null: bool = False, non_blocking: bool = False) -> streams.Stream:
        return streams.Stream(self._xp)

    def Event(self, block: bool = False, disable_timing: bool = False) -> streams.Event:
        return streams.Event(self._xp)

    def get_current_stream(self) -> streams.Stream:
        return self._xp.current

    def Memory(self, size: int) -> Block:
        self._xp.saw("allocations", f"{size} bytes")
        return Block(size)

    def driver_malloc(self, size: int) -> memory.MemoryPointer:
        """What pools get their blocks from (``cupy.cuda.memory._malloc``)."""
        return memory.MemoryPointer(self.Memory(size), 0)

    def MemoryPool(self, allocator: Allocator | None = None) -> memory.MemoryPool:
        return memory.MemoryPool(self._xp, allocator)

    def alloc(self, size: int) -> memory.MemoryPointer:
        return self.allocators.current(size)

    def set_allocator(self, allocator: Allocator) -> None:
        self.allocators.current = allocator

    def using_allocator(self, allocator: Allocator | None = None) -> AbstractContextManager[None]:
        return self.allocators.using(allocator)

    def alloc_pinned_memory(self, size: int) -> memoryview:
        return alloc_pinned_memory(size)

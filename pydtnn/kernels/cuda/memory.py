"""Memory of a GPU: CuPy's pool, another one for what is captured, scratch memory that stays.

CuPy's pool gives a freed block to the next request on the same stream, so nothing waits
and little is ever allocated. It knows nothing of CUDA graphs (CuPy 14.2): what is allocated while a
stream is captured comes from the same pool, and goes back to it when the last array ends, though
the graph will write there whenever it is replayed. An array that is made between two replays could
lie there. So whatever is captured, and the runs that warm it up, allocates in `apart`, a pool that
gives nothing to others.

A pool that is short of blocks calls ``cudaMalloc``. While a stream is captured that is allowed
in the relaxed mode, CuPy's default, and the block is there before the graph is ever replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pydtnn.kernels.reference.family import Array

OUT_OF_MEMORY = 2
"""Status of a call of CUDA's that found no memory (cudaErrorMemoryAllocation)."""


class DeviceMemory:
    """What arrays of a GPU are allocated from.

    Parameters
    ----------
    cupy : module

    Attributes
    ----------
    pool : cupy.cuda.MemoryPool
        CuPy's own: arrays of users of CuPy come from it, too.
    threshold : int
        Bytes from which on arrays come from here: all of them.
    scratch : Scratch
        What libraries use for themselves.
    """

    threshold = 1

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.pool = cupy.get_default_memory_pool()
        self.scratch = Scratch(cupy)
        self._apart: Any = None
        self._kept: list[Any] = []
        self._peak_held = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array with undefined contents."""
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array of zeros."""
        return self._cupy.zeros(shape, dtype)

    @contextlib.contextmanager
    def recycling(self) -> Iterator[None]:
        """Do nothing: all arrays of CuPy come from its pool as it is."""
        yield

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Return a context in which this thread allocates from memory of its own.

        What is captured here may be replayed as long as this object lives. Graphs that are
        captured here share memory, so they must not be replayed at the same time, and what one of
        them returns is only safe from the others while it is referenced.
        """
        if self._apart is None:
            self._apart = self._cupy.cuda.MemoryPool(self._keep)
        with self._cupy.cuda.using_allocator(self._apart.malloc):
            yield

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """Return a context as `apart`, whose memory is given back to the driver at its end."""
        kept: list[Any] = []
        pool = self._cupy.cuda.MemoryPool(lambda size: self._block(size, kept))
        with self._cupy.cuda.using_allocator(pool.malloc):
            yield

    def _keep(self, size: int) -> Any:
        return self._block(size, self._kept)

    def _block(self, size: int, kept: list[Any]) -> Any:
        """Allocate a block that is kept when its pool, short of memory, would free it."""
        cuda = self._cupy.cuda
        try:
            block = cuda.Memory(size)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            self.pool.free_all_blocks()  # what only waits to be used again, outside
            block = cuda.Memory(size)
        kept.append(block)
        return cuda.MemoryPointer(block, 0)

    @property
    def in_use(self) -> int:
        """Bytes of arrays that are alive; with those that a graph will use."""
        return int(self.pool.used_bytes()) + self._held_apart

    @property
    def held(self) -> int:
        """Bytes that were taken from the device and not given back."""
        held = int(self.pool.total_bytes()) + self._held_apart
        self._peak_held = max(self._peak_held, held)
        return held

    @property
    def peak_held(self) -> int:
        """The most that was held: more than the most that was in use, which CuPy does not count."""
        return max(self.held, self._peak_held)

    @property
    def _held_apart(self) -> int:
        return sum(block.size for block in self._kept)

    def reset_peak(self) -> None:
        """Begin to look for the peak."""
        self._peak_held = 0

    def trim(self) -> None:
        """Return unused blocks to the driver, but none that a graph may use."""
        self._peak_held = self.peak_held
        self.pool.free_all_blocks()


class Scratch:
    """Memory for one call of a library at a time, for each stream one block that only grows.

    A step then allocates nothing, and a graph finds its block where it was: blocks that have
    become too small are kept for the graphs that know them.

    Parameters
    ----------
    cupy : module
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._blocks: dict[int, list[Array]] = {}
        self._passing = False

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Return a context in which nothing is kept: for candidates that may not be chosen."""
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def take(self, nbytes: int) -> Array:
        """Return at least so many bytes for what the current stream is given next.

        Raises
        ------
        MemoryError
            If there is not so much.
        """
        blocks = self._blocks.setdefault(self._cupy.cuda.get_current_stream().ptr, [])
        if blocks and blocks[-1].nbytes >= nbytes:
            return blocks[-1]
        block = self._cupy.empty((nbytes,), "uint8")  # CuPy's errors are MemoryErrors
        if not self._passing:
            blocks.append(block)
        return block

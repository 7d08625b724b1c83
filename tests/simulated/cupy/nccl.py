"""``cupy.cuda.nccl``: pointers, counts and numbers of types, as in C; ranks meet in the fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.simulated.cupy.memory import raw

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy
    from tests.simulated.cupy.streams import Stream, Work

NAMES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
TYPES = [*map(np.dtype, NAMES), np.dtype(ml_dtypes.bfloat16)]
OPERATIONS = {0: np.add, 2: np.maximum, 3: np.minimum}
Make = Callable[[], "Work"]


class Nccl:
    """The module of one rank."""

    def __init__(self, device: SimulatedCupy) -> None:
        self.device = device
        self.available = True
        self._group: list[tuple[int, Make]] | None = None

    def get_version(self) -> int:
        return 22800

    def get_unique_id(self) -> bytes:
        return self.device.fabric.new_group().to_bytes(128)

    def groupStart(self) -> None:
        assert self._group is None
        self._group = []

    def groupEnd(self) -> None:
        assert self._group is not None
        parts, self._group = self._group, None
        streams = {stream for stream, _ in parts}
        assert len(streams) <= 1

        def together() -> Work:
            waiting = [make() for _, make in parts]

            def progress() -> bool:
                waiting[:] = [work for work in waiting if not work()]
                return not waiting

            return progress

        if parts:
            self._stream(streams.pop()).add(together)

    def enqueue(self, stream: int, make: Make) -> None:
        if self._group is not None:
            self._group.append((stream, make))
        else:
            self._stream(stream).add(make)

    def _stream(self, ptr: int) -> Stream:
        return next(stream for stream in self.device.streams if stream.ptr == ptr)

    def NcclCommunicator(self, size: int, unique: bytes, rank: int) -> Group:
        return Group(self, size, int.from_bytes(unique), rank)


class Group:
    """``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, nccl: Nccl, size: int, number: int, rank: int) -> None:
        self.nccl, self.size, self.number, self.rank = nccl, size, number, rank
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}

    def allReduce(
        self, source: int, out: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        def finish(values: list[np.ndarray]) -> None:
            at(out, count, dtype)[...] = reduced(values, op)

        self._meet(("allReduce", count, dtype, op), (source, count, dtype), finish, stream)

    def reduce(
        self, source: int, out: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        def finish(values: list[np.ndarray]) -> None:
            if self.rank == root:
                at(out, count, dtype)[...] = reduced(values, op)

        self._meet(("reduce", count, dtype, op, root), (source, count, dtype), finish, stream)

    def broadcast(
        self, source: int, out: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        def finish(values: list[np.ndarray]) -> None:
            at(out, count, dtype)[...] = values[root]

        read = count if self.rank == root else 0  # elsewhere the source may be anything
        self._meet(("broadcast", count, dtype, root), (source, read, dtype), finish, stream)

    def reduceScatter(
        self, source: int, out: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        def finish(values: list[np.ndarray]) -> None:
            whole = reduced(values, op)
            at(out, count, dtype)[...] = whole[self.rank * count : (self.rank + 1) * count]

        whole = (source, count * self.size, dtype)
        self._meet(("reduceScatter", count, dtype, op), whole, finish, stream)

    def allGather(self, source: int, out: int, count: int, dtype: int, stream: int) -> None:
        def finish(values: list[np.ndarray]) -> None:
            at(out, count * self.size, dtype)[...] = np.concatenate(values)

        self._meet(("allGather", count, dtype), (source, count, dtype), finish, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """It ends when the other side has received: NCCL promises no buffers."""
        pair = (self.rank, peer)
        self._message(
            pair, 0, (count, dtype), lambda: at(source, count, dtype).copy(), None, stream
        )

    def recv(self, out: int, count: int, dtype: int, peer: int, stream: int) -> None:
        def finish(values: list[Any]) -> None:
            at(out, count, dtype)[...] = values[0]

        self._message((peer, self.rank), 1, (count, dtype), lambda: None, finish, stream)

    def _message(
        self,
        pair: tuple[int, int],
        side: int,
        what: tuple[int, int],
        value: Callable[[], Any],
        finish: Callable[[list[Any]], None] | None,
        stream: int,
    ) -> None:
        """Enqueue one side of a message, of those of two ranks the next in order."""
        fabric = self.nccl.device.fabric

        def make() -> Work:
            number = self._messages[pair] = self._messages.get(pair, 0) + 1
            key, here = (self.number, *pair, number), False

            def work() -> bool:
                nonlocal here
                if not here:
                    fabric.bring(key, side, what, value())
                    here = True
                values = fabric.brought(key, 2)
                if values is not None and finish is not None:
                    finish(values)
                return values is not None

            return work

        self.nccl.enqueue(stream, make)

    def _meet(
        self,
        what: tuple[Any, ...],
        source: tuple[int, int, int],
        finish: Callable[[list[np.ndarray]], None],
        stream: int,
    ) -> None:
        """Enqueue: read what is at `source`, wait for all ranks, then `finish`."""
        fabric = self.nccl.device.fabric

        def make() -> Work:
            self._calls += 1  # also for each replay of a graph: it is another meeting
            key, here = (self.number, self._calls), False

            def work() -> bool:
                nonlocal here
                if not here:
                    fabric.bring(key, self.rank, what, at(*source).copy())
                    here = True
                values = fabric.brought(key, self.size)
                if values is not None:
                    finish(values)
                return values is not None

            return work

        self.nccl.enqueue(stream, make)


def at(pointer: int, count: int, dtype: int) -> np.ndarray:
    """View memory as an array."""
    return raw(pointer, count * TYPES[dtype].itemsize).view(TYPES[dtype])


def reduced(values: list[np.ndarray], op: int) -> np.ndarray:
    total = values[0].copy()
    for value in values[1:]:
        total = OPERATIONS[op](total, value)
    return total

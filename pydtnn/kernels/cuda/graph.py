"""Work of the device, captured once as a CUDA graph and replayed from then on.

A step of a small network is hundreds of kernels of a few microseconds each, which Python cannot
launch as fast as the device carries them out. A graph is launched by one call. It repeats the same
kernels on the same addresses: so its arrays come from memory that is kept for it as long as it
lives, and what changes from step to step is read from device memory (below).

References
----------
NVIDIA, "CUDA C++ programming guide", section "CUDA graphs".
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.utils.device import Device, DeviceArray, Event

# Input at fixed addresses: brought to the device while the last step runs on what came before.
#
# A graph reads its input where it was captured, so a new batch can arrive only in other memory, and
# is copied over before the graph starts, at the device's own bandwidth. On the way it takes three
# places:
#
#     host arrays -> pinned memory -> landing place -> fixed place
#       copied by the CPU    by the DMA engine     by the device
#
# In each of them all arrays lie one behind the other, so that two copies bring them, however many
# they are. Pinned memory has three sets in turn, since the CPU is one or two steps ahead of the
# device; the landing place is free again as soon as the next step has begun.

SETS = 3

APART = 512
"""Bytes of which arrays begin at a multiple, as those of CuPy's own pool do."""

UNIT = "uint64"
"""What the device copies at a time."""


class Feed:
    """Arrays of the device that are refilled for every step.

    Parameters
    ----------
    device : Device
    like : sequence of ndarray
        One of each, of the shape and type that all will have; they may be empty.

    Attributes
    ----------
    arrays : list of Array
        What a step reads.
    """

    def __init__(self, device: Device, like: Sequence[np.ndarray]) -> None:
        self.device, xp = device, device.xp
        ends = np.cumsum([-(-a.nbytes // APART) * APART for a in like], dtype=int)
        units = (max(int(ends[-1]), APART) // np.dtype(UNIT).itemsize,)
        self._fixed, self._landing = xp.empty(units, UNIT), xp.empty(units, UNIT)
        self._pinned = [device.pinned(self._landing) for _ in range(SETS)]
        starts = [0, *ends[:-1].tolist()]
        self.arrays: list[DeviceArray] = _parts(self._fixed, starts, like)
        self._sets = [_parts(pinned, starts, like) for pinned in self._pinned]
        self._sent: list[Event | None] = [None] * SETS
        self._taken = device.mark(device.current)  # earlier uses of this memory are complete then
        self._arrived: Event | None = None
        self._turn = 0

    def send(self, *arrays: np.ndarray) -> None:
        """Start to bring the next step's arrays to the device; these may be changed at once."""
        turn, self._turn = self._turn, (self._turn + 1) % SETS
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()  # of three steps ago: it does not wait long
        for array, pinned in zip(arrays, self._sets[turn], strict=True):
            assert array.shape == pinned.shape, "not of the shape that was fed before"
            np.copyto(pinned, array, casting="no")
        stream = self.device.up
        stream.wait_event(self._taken)
        self._landing.set(self._pinned[turn], stream=stream)
        self._sent[turn] = self._arrived = self.device.mark(stream)

    def take(self) -> None:
        """Let the current stream wait for what was sent, and put it in its place."""
        current = self.device.current
        current.wait_event(self._arrived)
        self._fixed[...] = self._landing
        self._taken = self.device.mark(current)


def _parts(memory: Any, starts: Sequence[int], like: Sequence[np.ndarray]) -> list[Any]:
    """View parts of memory as arrays of these types and shapes."""
    plain = memory.view("uint8")
    return [
        plain[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        for start, a in zip(starts, like, strict=True)
    ]


class Late:
    """The values of an array as they are on the current stream, for the host to read later on.

    Parameters
    ----------
    device : Device
    array : Array
        It may be overwritten by what the current stream is given next. It is held until the copy is
        there: its memory belongs to the stream that made it, which need not be the current one.
    """

    def __init__(self, device: Device, array: Any) -> None:
        self._array = array
        self._mirror = device.pinned(array).reshape(array.shape)
        array.get(stream=device.current, out=self._mirror, blocking=False)
        self._copied = device.mark(device.current)

    @property
    def arrived(self) -> bool:
        """Whether `values` would return at once."""
        return bool(self._copied.done)

    def values(self) -> np.ndarray:
        """Wait for the values, and return a copy of them."""
        self._copied.synchronize()
        self._array = None
        return self._mirror.copy()


WARM_UP = 3
"""Times that work runs before it is captured: libraries load kernels and make their workspaces,
algorithms are chosen, and the pool grows to what is needed."""


class Graphs:
    """Carry out work by its key: as it is at first, then captured, then replayed.

    Parameters
    ----------
    device : Device
    stream : cupy.cuda.Stream, optional
        On which work runs, not the legacy default stream; by default one of our own.
    memory : callable, optional
        Returns a context in which arrays come from a pool of their own: a graph writes
        where its arrays lay when it was captured, whatever has that memory now. Several graphs may
        share the pool, since they run one after the other, and nothing is read after a graph but
        what the work returned, which is kept.

    Attributes
    ----------
    why_not : str
        What kept work from being captured, and where; empty while nothing did. All work then runs
        as it is.
    """

    def __init__(
        self,
        device: Device,
        stream: Any = None,
        memory: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.device = device
        self.stream = device.stream() if stream is None else stream
        self.why_not = ""
        self._memory = memory
        self._calls: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[Any, Any]] = {}

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Carry out work; return what it returned, now or when it was captured.

        Parameters
        ----------
        key : hashable
            What decides which kernels run on which shapes: work of one key must be the same work.
        work : callable
            Enqueues kernels on the current stream. It may be called several times for one step, and
            for most steps is not called at all: so it must leave nothing behind on the host.
        """
        with self._here():
            if key not in self._captured and not self._capture(key, work):
                return work()
            graph, result = self._captured[key]
            graph.launch(self.stream)
            return result

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Make our stream and memory current, between what the caller enqueues before and after."""
        outside = self.device.current
        self.stream.wait_event(self.device.mark(outside))
        try:
            with self._memory(), self.stream:
                yield
        finally:
            outside.wait_event(self.device.mark(self.stream))

    def _capture(self, key: Hashable, work: Callable[[], Any]) -> bool:
        """Capture work whose warm-up is over; return whether there is a graph of it."""
        if self.why_not or self._calls[key] < WARM_UP:
            self._calls[key] += 1
            return False
        try:
            self._captured[key] = capture(self.stream, work)
        except Exception as problem:
            self.why_not = _reason(problem)
            return False
        return True


def capture(stream: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture work on a stream.

    Nothing is collected as garbage meanwhile: a handle of cuBLAS's that ends waits for the device,
    which breaks whatever is captured there (as `torch.cuda.graph` collects beforehand).

    Parameters
    ----------
    stream : cupy.cuda.Stream
        The current one; it is not captured any more when this returns or raises.
    work : callable

    Returns
    -------
    tuple
        The graph, and what the work has returned.

    Raises
    ------
    Exception
        What broke the capture.
    """
    problem: Exception | None = None
    graph = result = None
    collecting = gc.isenabled()
    gc.disable()
    try:
        stream.begin_capture()
        try:
            result = work()
        except Exception as error:
            problem = error
        finally:
            try:
                graph = stream.end_capture()
            except RuntimeError as error:  # the capture ended where it was broken
                problem = problem or error
    finally:
        if collecting:
            gc.enable()
    if problem is not None:
        raise problem
    return graph, result


def _reason(problem: Exception) -> str:
    """Say what happened on which line, outside of CuPy: "trainer.py:245: ... not permitted"."""
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if not {"cupy", "cupy_backends"} & set(Path(frame.filename).parts)
    ]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{' '.join(str(problem).split()) or type(problem).__name__}"

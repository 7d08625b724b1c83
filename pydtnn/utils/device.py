"""Streams, events and pinned host memory of a device.

No function here blocks until the device is done. Events order the work of the current stream and
of the copy streams in both directions: a copy starts after all work enqueued so far, and work
enqueued later starts after the copy.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

Event = Any
"""A CUDA event: ``done`` is its status, ``synchronize()`` blocks until it is complete."""

DeviceArray = Any


class Device:
    """The device on which the arrays of a module are stored.

    Parameters
    ----------
    xp : module
        CuPy, or a module with the same interface; an argument, as this file must not import CuPy.

    Attributes
    ----------
    down, up : stream
        Streams of copies to the host and to the device, which can run concurrently.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.down, self.up = self.stream(), self.stream()
        self._flying: deque[tuple[Event, np.ndarray]] = deque()

    def stream(self) -> Any:
        """Return a new stream that does not synchronize with the legacy default stream."""
        return self.xp.cuda.Stream(non_blocking=True)

    @property
    def current(self) -> Any:
        """The current stream of the calling thread."""
        return self.xp.cuda.get_current_stream()

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph instead of executed."""
        return bool(self.current.is_capturing())

    def mark(self, stream: Any) -> Event:
        """Record an event after the work enqueued on a stream so far."""
        return stream.record(self.xp.cuda.Event(disable_timing=True))

    def pinned(self, array: DeviceArray) -> np.ndarray:
        """Allocate page-locked memory for a copy of an array, as asynchronous copies require."""
        memory = self.xp.cuda.alloc_pinned_memory(max(array.nbytes, 1))  # from CuPy's pool
        return np.frombuffer(memory, np.uint8)[: array.nbytes].view(array.dtype)

    def download(self, array: DeviceArray, after: Event) -> tuple[np.ndarray, Event]:
        """Copy an array to the host asynchronously, after `after`; return copy and end event."""
        mirror = self.pinned(array)
        self.down.wait_event(after)
        array.get(stream=self.down, out=mirror, blocking=False)
        return mirror, self.mark(self.down)

    def upload(self, mirror: np.ndarray, array: DeviceArray, after: Event) -> None:
        """Copy pinned memory to an array asynchronously, after the event `after`.

        Work enqueued on the current stream from now on starts after the copy.
        """
        self.up.wait_event(after)
        array.set(mirror, stream=self.up)
        copied = self.mark(self.up)
        self.current.wait_event(copied)
        while self._flying and self._flying[0][0].done:
            self._flying.popleft()
        self._flying.append((copied, mirror))  # keeps CuPy from reusing the memory

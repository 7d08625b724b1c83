"""Beside a device's kernels: streams of our own, events, and pinned memory of the host.

Nothing here waits for the device. Work of the current stream and of our own is put in order by
events, in both directions: ours begins after what the caller has enqueued so far, and what the
caller enqueues later begins after ours.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

Event = Any
"""An event of CUDA: ``done`` asks, ``synchronize()`` waits."""

DeviceArray = Any


class Device:
    """The device on which the arrays of a module live.

    Parameters
    ----------
    xp : module
        CuPy, or what behaves like it; it is handed on because nothing here may import it.

    Attributes
    ----------
    down, up : stream
        For copies to the host and to the device, which may run at the same time.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.down, self.up = self.stream(), self.stream()
        self._flying: deque[tuple[Event, np.ndarray]] = deque()

    def stream(self) -> Any:
        """Make a stream that does not wait for the legacy default stream."""
        return self.xp.cuda.Stream(non_blocking=True)

    @property
    def current(self) -> Any:
        """The stream on which the caller's work goes."""
        return self.xp.cuda.get_current_stream()

    @property
    def capturing(self) -> bool:
        """Whether the caller's work is being captured in a graph instead of carried out."""
        return bool(self.current.is_capturing())

    def mark(self, stream: Any) -> Event:
        """Record an event after what a stream has been given so far."""
        return stream.record(self.xp.cuda.Event(disable_timing=True))

    def pinned(self, array: DeviceArray) -> np.ndarray:
        """Take page-locked memory for a copy of an array: only such copies run by themselves."""
        memory = self.xp.cuda.alloc_pinned_memory(max(array.nbytes, 1))  # from CuPy's pool
        return np.frombuffer(memory, np.uint8)[: array.nbytes].view(array.dtype)

    def download(self, array: DeviceArray, after: Event) -> tuple[np.ndarray, Event]:
        """Start to copy an array to the host, once `after` has happened; the event is its end."""
        mirror = self.pinned(array)
        self.down.wait_event(after)
        array.get(stream=self.down, out=mirror, blocking=False)
        return mirror, self.mark(self.down)

    def upload(self, mirror: np.ndarray, array: DeviceArray, after: Event) -> None:
        """Start to copy pinned memory to an array, once `after` has happened.

        What the current stream is given from now on comes after the copy.
        """
        self.up.wait_event(after)
        array.set(mirror, stream=self.up)
        copied = self.mark(self.up)
        self.current.wait_event(copied)
        while self._flying and self._flying[0][0].done:
            self._flying.popleft()
        self._flying.append((copied, mirror))  # else CuPy gave the memory to the next who asks

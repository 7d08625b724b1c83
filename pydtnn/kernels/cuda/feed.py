"""Input at fixed addresses: brought to the device while the last step runs on what came before.

A graph reads its input where it was captured, so a new batch can arrive only in other memory, and
is copied over before the graph starts, at the device's own bandwidth. On the way it takes three
places:

    host array -> pinned memory -> landing place -> fixed array
      copied by the CPU    by the DMA engine     by the device

Pinned memory has three sets in turn, since the CPU is one or two steps ahead of the device; the
landing place is free again as soon as the next step has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.device import Device, DeviceArray, Event

SETS = 3


class Feed:
    """Arrays of the device that are refilled for every step.

    Parameters
    ----------
    device : Device
    like : sequence of ndarray
        One of each, of the shape and type that all will have.

    Attributes
    ----------
    arrays : list of Array
        What a step reads.
    """

    def __init__(self, device: Device, like: Sequence[np.ndarray]) -> None:
        self.device, xp = device, device.xp
        self.arrays: list[DeviceArray] = [xp.empty(a.shape, a.dtype) for a in like]
        self._landing: list[DeviceArray] = [xp.empty(a.shape, a.dtype) for a in like]
        self._pinned = [[device.pinned(a).reshape(a.shape) for a in like] for _ in range(SETS)]
        self._sent: list[Event | None] = [None] * SETS
        self._taken = device.mark(device.current)  # whoever had this memory before is done then
        self._arrived: Event | None = None
        self._turn = 0

    def send(self, *arrays: np.ndarray) -> None:
        """Start to bring the next step's arrays to the device; these may be changed at once."""
        turn, self._turn = self._turn, (self._turn + 1) % SETS
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()  # of three steps ago: it keeps nobody
        stream = self.device.up
        stream.wait_event(self._taken)
        for array, pinned, landing in zip(arrays, self._pinned[turn], self._landing, strict=True):
            np.copyto(pinned, array)
            landing.set(pinned, stream=stream)
        self._sent[turn] = self._arrived = self.device.mark(stream)

    def take(self) -> None:
        """Let the current stream wait for what was sent, and put it in its place."""
        current = self.device.current
        current.wait_event(self._arrived)
        for array, landing in zip(self.arrays, self._landing, strict=True):
            array[...] = landing
        self._taken = self.device.mark(current)


class Late:
    """The values of an array as they are on the current stream, for the host to read later on.

    Parameters
    ----------
    device : Device
    array : Array
        It may be overwritten by what the current stream is given next.
    """

    def __init__(self, device: Device, array: Any) -> None:
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
        return self._mirror.copy()

"""Input at fixed addresses: brought to the device while the last step runs on what came before.

A graph reads its input where it was captured, so a new batch can arrive only in other memory, and
is copied over before the graph starts, at the device's own bandwidth. On the way it takes three
places:

    host arrays -> pinned memory -> landing place -> fixed place
      copied by the CPU    by the DMA engine     by the device

In each of them all arrays lie one behind the other, so that two copies bring them, however many
they are. Pinned memory has three sets in turn, since the CPU is one or two steps ahead of the
device; the landing place is free again as soon as the next step has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.utils.device import Device, DeviceArray, Event

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


class LateValues:
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

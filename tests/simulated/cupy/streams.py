"""Streams and events: work in order, none of which runs by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulated.cupy.graphs import Capture, Graph, Mark

if TYPE_CHECKING:
    from tests.simulated.cupy.memory import Block
    from tests.simulated.cupy.module import SimulatedCupy

Work = Callable[[], bool]
"""Does something, or returns False where it must be tried again later."""

FORBIDDEN = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"


class Stream:
    """Work that is carried out in order; while the stream is captured, it is recorded instead."""

    def __init__(self, device: SimulatedCupy) -> None:
        self.device = device
        self.work: deque[Work] = deque()
        self.ptr = 1000 + len(device.streams)
        self.capture: Capture | None = None
        self.given_back: list[tuple[Block, Capture | None]] = []  # and in which capture, if in one
        device.streams.append(self)

    def put(self, call: Callable[[], object], blocks: Iterable[Block] = ()) -> None:
        """Enqueue a call that touches some memory; it can be made as soon as it is its turn."""

        spoiled: list[tuple[Block, Capture | None]] = []
        rest: list[tuple[Block, Capture | None]] = []
        while self.given_back:  # a finalizer may add to it
            block, capture = self.given_back.pop()
            (spoiled if capture is self.capture else rest).append((block, capture))
        self.given_back += [(b, c) for b, c in rest if c is None or not c.ended]

        def work() -> bool:
            for block, _ in spoiled:
                block.spoil()
            if any(block.returned for block in blocks):
                raise RuntimeError("illegal address: the memory was returned to the driver")
            with np.errstate(all="ignore"):  # a device does not warn
                call()
            return True

        self.add(lambda: work)

    def add(self, make: Callable[[], Work]) -> None:
        """Enqueue work, which is made anew by each replay of a graph."""
        if self.capture is not None:
            self._check()
            self.capture.add(self, lambda done: make())
        else:
            self.work.append(make())
            self.device.advance()

    @property
    def ready(self) -> bool:
        """Whether what is enqueued now would run at once."""
        return self.device.eager and self.capture is None and not self.work

    def run(self) -> bool:
        """Do the next piece of work, if it can be done."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True

    # -- what CuPy's streams have -----------------------------------------------------------------

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        mark = event.mark = Mark(self.capture)
        if self.capture is not None:
            self.put(lambda: None)  # what was given back is overwritten before others may use it
            self.capture.record(self, mark)
        else:
            self.put(mark.reach)
        return event

    def wait_event(self, event: Event) -> None:
        mark = event.mark
        if mark.capture is None and self.capture is None:
            self.add(lambda: lambda: mark.done)
        elif mark.capture is None:
            if not mark.initial:
                self.forbid("dependency created on uncaptured work in another stream")
        elif mark.capture.ended or self.capture not in (None, mark.capture):
            self.forbid("an event of a capture can be waited for in this capture only")
        else:
            self.capture = mark.capture  # fork: this stream's work belongs to the capture from here
            self.capture.wait(self, mark)

    def synchronize(self) -> None:
        self.device.host_waits("a stream")
        mark = self.record().mark
        self.device.fabric.wait(self.device, lambda: mark.done)

    @property
    def done(self) -> bool:
        return not self.work

    def is_capturing(self) -> bool:
        self._check()
        return self.capture is not None

    def _check(self) -> None:
        """Raise what everything raises from where a capture was broken to its end."""
        if self.capture is not None and self.capture.broken:
            raise RuntimeError(INVALIDATED)

    def begin_capture(self, mode: Any = None) -> None:
        assert self.capture is None
        self.capture = Capture(self)

    def end_capture(self) -> Graph:
        assert self.capture is not None
        return self.capture.end(self)

    def forbid(self, reason: str = FORBIDDEN) -> None:
        """Raise what CUDA raises, and let the capture fail that it happened in."""
        for stream in (self, self.device.current):
            if stream.capture is not None:
                stream.capture.broken = stream.capture.broken or reason
        raise RuntimeError(reason)

    def use(self) -> Stream:
        self.device.current = self
        return self

    def __enter__(self) -> Stream:
        self._outside = [*getattr(self, "_outside", []), self.device.current]
        self.device.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current = self._outside.pop()


class Event:
    """A place in a stream. One that was never recorded has happened."""

    def __init__(self, device: SimulatedCupy) -> None:
        self.device = device
        self.mark = Mark(None, initial=True)

    def record(self, stream: Stream | None = None) -> None:
        (stream or self.device.current).record(self)

    @property
    def done(self) -> bool:
        self._ask("an event of a capture cannot be asked")
        for _ in range(self.device.random.randrange(3)):
            self.device.fabric.run(self.device)
        return self.mark.done

    def synchronize(self) -> None:
        self._ask(FORBIDDEN)
        self.device.host_waits("an event")
        self.device.fabric.wait(self.device, lambda: self.mark.done)

    def _ask(self, refusal: str) -> None:
        if self.device.current.capture is not None or self.mark.capture is not None:
            self.device.current.forbid(refusal)

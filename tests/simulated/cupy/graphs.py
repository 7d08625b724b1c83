"""Captures of streams, and the graphs they leave: the same work on the same addresses, again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated.cupy.streams import Stream, Work


class Mark:
    """What an event recorded: whether the stream has come there.

    Parameters
    ----------
    capture : Capture or None
        In which it was recorded: then it happens only inside of replays.
    initial : bool
        Whether it stands for an event that was never recorded.
    """

    def __init__(self, capture: Capture | None, *, initial: bool = False) -> None:
        self.capture, self.initial, self.done = capture, initial, initial

    def reach(self) -> None:
        self.done = True


Reached = set[Mark]
"""The marks that one replay has come to."""

Node = Callable[[Reached], "Work"]


class Capture:
    """What streams are told between `begin_capture` and `end_capture`.

    Parameters
    ----------
    origin : Stream
        On which it began and must end. Streams that wait for an event of the capture join it.
    """

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.broken = ""
        self.ended = False
        self._nodes: list[tuple[Stream, Node]] = []
        self._lanes: dict[Stream, Mark | None] = {origin: None}  # with the mark where each ends
        self._waited: Reached = set()

    def add(self, stream: Stream, node: Node) -> None:
        self._nodes.append((stream, node))
        self._lanes[stream] = None

    def record(self, stream: Stream, mark: Mark) -> None:
        def reach(reached: Reached) -> Work:
            def work() -> bool:
                reached.add(mark)
                return True

            return work

        self.add(stream, reach)
        self._lanes[stream] = mark

    def wait(self, stream: Stream, mark: Mark) -> None:
        self.add(stream, lambda reached: lambda: mark in reached)
        self._waited.add(mark)

    def end(self, stream: Stream) -> Graph:
        self.ended = True
        for lane, end in self._lanes.items():
            lane.capture = None
            if lane is not self.origin and end not in self._waited:
                self.broken = self.broken or "a stream that joined the capture was not waited for"
        if stream is not self.origin:
            self.broken = "a capture must end on the stream where it began"
        if self.broken:
            raise RuntimeError(self.broken)
        return Graph(self._nodes)


class Graph:
    """Captured work, which can be put on a stream any number of times.

    Its branches run side by side: in an order drawn at random, as far as events leave it open.
    """

    def __init__(self, nodes: list[tuple[Stream, Node]]) -> None:
        self.nodes = nodes

    def launch(self, stream: Stream | None = None) -> None:
        device = self.nodes[0][0].device if stream is None else stream.device
        stream = device.current if stream is None else stream
        stream.put(lambda: None)  # what was given back is overwritten before the graph uses it
        stream.add(lambda: self._replay(device.random.shuffle))

    def upload(self, stream: Stream) -> None:
        pass

    def _replay(self, shuffle: Callable[[list[Stream]], None]) -> Work:
        reached: Reached = set()
        lanes: dict[Stream, deque[Work]] = {}
        for stream, node in self.nodes:
            lanes.setdefault(stream, deque()).append(node(reached))

        def progress() -> bool:
            moved = True
            while moved:
                moved, order = False, list(lanes)
                shuffle(order)
                for stream in order:
                    while lanes[stream] and lanes[stream][0]():
                        lanes[stream].popleft()
                        moved = True
            return not any(lanes.values())

        return progress

"""How long calls take on a GPU: captured several times in a row, replayed, and timed by events.

So Python's time to launch a kernel is not counted, as it is not in a step that is a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[[], object]
WARM_UP = 3


class OursReplay:
    """A call of our kernels, `repeat` times in a graph.

    What cannot be captured is launched as it is, and `captured` is False.
    """

    def __init__(self, backend: Any, call: Call, repeat: int) -> None:
        self.cuda, self.stream = backend.xp.cuda, backend.stream
        self.call, self.repeat = call, repeat
        for _ in range(WARM_UP):
            call()
        self.stream.synchronize()
        self.events = self.cuda.Event(), self.cuda.Event()
        self.stream.begin_capture()
        try:
            self.launch_all()
        except Exception:  # whatever breaks a capture: reading a value back, a library that cannot
            self.captured = False
        else:
            self.captured = True
        try:
            self.graph = self.stream.end_capture()
        except RuntimeError:
            self.captured = False
        if self.captured:
            self.graph.upload(self.stream)

    def launch_all(self) -> None:
        """Launch the call as often as asked."""
        for _ in range(self.repeat):
            self.call()

    def seconds(self) -> float:
        """Time one call, as the mean of a replay."""
        start, end = self.events
        self.stream.record(start)
        if self.captured:
            self.graph.launch(self.stream)
        else:
            self.launch_all()
        self.stream.record(end)
        end.synchronize()
        return self.cuda.get_elapsed_time(start, end) / 1e3 / self.repeat


class TheirsReplay:
    """The same of a call of PyTorch's."""

    def __init__(self, call: Call, repeat: int) -> None:
        import torch

        self.torch, self.repeat = torch, repeat
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(repeat):
                call()
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds(self) -> float:
        """Time one call, as the mean of a replay."""
        start, end = self.events
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.repeat

"""How long calls take on a GPU: captured several times in a row, replayed, and timed by events.

So Python's time to launch a kernel is not counted, as it is not in a step that is a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

Call = Callable[[], object]
WARM_UP = 3


class Replay(Protocol):
    """A call that is timed; `captured` says whether without its launches."""

    captured: bool

    def seconds(self) -> float:
        """Time one call, as the mean of a replay."""


class OnHost:
    """A call that computes on the host: a way to try the scripts out."""

    captured = True

    def __init__(self, call: Call, repeat: int) -> None:
        self.call, self.repeat = call, repeat
        call()

    def seconds(self) -> float:
        """Time one call."""
        start = time.perf_counter()
        for _ in range(self.repeat):
            self.call()
        return (time.perf_counter() - start) / self.repeat


class OursReplay:
    """A call of our kernels, `repeat` times in a graph.

    What cannot be captured is launched as it is, and `captured` is False.
    """

    def __init__(self, backend: Any, call: Call, repeat: int) -> None:
        self.cuda, self.apart = backend.xp.cuda, backend.memory.apart
        self.stream = self.cuda.Stream(non_blocking=True)
        self.call, self.repeat = call, repeat
        backend.synchronize()  # operands were made on another stream
        with self.apart(), self.stream:
            for _ in range(WARM_UP):
                call()
            self.stream.synchronize()
            self.captured = self.capture()
        self.events = self.cuda.Event(), self.cuda.Event()

    def capture(self) -> bool:
        """Capture the calls, if that can be done."""
        from pydtnn.kernels.cuda.graph import capture

        try:
            self.graph, _ = capture(self.stream, self.launch_all)
        except Exception:  # whatever breaks a capture: reading a value back, a library that cannot
            return False
        return True

    def launch_all(self) -> None:
        """Launch the call as often as asked."""
        for _ in range(self.repeat):
            self.call()

    def seconds(self) -> float:
        """Time one call, as the mean of a replay."""
        start, end = self.events
        with self.apart(), self.stream:
            start.record(self.stream)
            if self.captured:
                self.graph.launch(self.stream)
            else:
                self.launch_all()
            end.record(self.stream)
        end.synchronize()
        return float(self.cuda.get_elapsed_time(start, end)) / 1e3 / self.repeat


class TheirsReplay:
    """The same of a call of PyTorch's."""

    captured = True

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


def ours(backend: Any, call: Call, repeat: int) -> Replay:
    """Time a call of ours where its arrays are."""
    on_gpu = backend.name == "cuda"
    return OursReplay(backend, call, repeat) if on_gpu else OnHost(call, repeat)


def theirs(backend: Any, call: Call, repeat: int) -> Replay:
    """Time a call of PyTorch's where our arrays are."""
    return TheirsReplay(call, repeat) if backend.name == "cuda" else OnHost(call, repeat)

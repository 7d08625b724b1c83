"""Work of the device, captured once as a CUDA graph and replayed from then on.

A step of a small network is hundreds of kernels of a few microseconds each, which Python cannot
launch as fast as the device carries them out. A graph is launched by one call. It repeats the same
kernels on the same addresses: so its arrays come from memory that is kept for it as long as it
lives, and what changes from step to step is read from device memory (`feed.py`).

References
----------
NVIDIA, "CUDA C++ programming guide", section "CUDA graphs".
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydtnn.utils.device import Device

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

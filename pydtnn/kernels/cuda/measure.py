"""Candidates as they will run in a captured step: several times in a row, from one CUDA graph.

Launching a small kernel takes the host longer than the kernel takes the device, and some libraries'
more than others'. In a captured step that does not count, so here it must not either. What cannot
be captured is found out in passing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pydtnn.kernels.cuda.engine import Refused
from pydtnn.kernels.cuda.graph import capture
from pydtnn.kernels.cuda.memory import DeviceMemory

REPEATS = 8
"""Launches for one measurement, so that they, and not the wait for them, are what is timed."""

CarryOut = Callable[[str, Callable[[], None]], None]
"""Carries out a candidate of a name, and waits for it; called once, and then again to be timed."""


class Measure:
    """Where candidates are measured: a stream, and memory that is given back afterwards.

    Parameters
    ----------
    cupy : module
    memory : DeviceMemory
    """

    def __init__(self, cupy: Any, memory: DeviceMemory) -> None:
        self._cupy, self._memory = cupy, memory
        self._stream = cupy.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[CarryOut]:
        """Return a context with a function that carries out candidates.

        It raises `Refused` for what cannot be captured, and what candidates raise themselves.
        """
        graphs: dict[str, Any] = {}
        with contextlib.ExitStack() as session:

            def carry_out(name: str, work: Callable[[], None]) -> None:
                if not graphs:  # often nothing is measured, perhaps while a step is captured
                    self._begin(session)
                with self._stream:
                    if name not in graphs:
                        work()  # loads kernels and makes choices, which cannot be captured
                        graphs[name] = self._capture(work)
                    graphs[name].launch(self._stream)
                    self._stream.synchronize()

            yield carry_out

    def _begin(self, session: contextlib.ExitStack) -> None:
        """Let our stream begin after the caller's, with memory of its own."""
        cuda = self._cupy.cuda
        before = cuda.get_current_stream().record(cuda.Event(disable_timing=True))
        self._stream.wait_event(before)
        session.enter_context(self._memory.temporary())
        session.enter_context(self._memory.scratch.passing())
        session.callback(self._stream.synchronize)  # first of these, also after an error

    def _capture(self, work: Callable[[], None]) -> Any:
        """Capture some launches on our stream."""

        def several() -> None:
            for _ in range(REPEATS):
                work()

        try:
            return capture(self._stream, several)[0]
        except Exception as problem:
            raise Refused(f"it cannot be captured in a graph: {problem}") from problem

"""A request that consists of several: exchanges whose next message depends on the last."""

from __future__ import annotations

from collections.abc import Iterator

from pydtnn.comm.communicator import Request


class Steps(Request):
    """Carry out a generator that yields what it waits for.

    It runs up to its first ``yield`` at once, and on from each when that request is complete.

    Parameters
    ----------
    steps : iterator of Request
    """

    def __init__(self, steps: Iterator[Request]) -> None:
        self._steps = steps
        self._current = next(steps, None)

    def wait(self) -> None:
        while self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)

    def test(self) -> bool:
        while self._current is not None and self._current.test():
            self._current = next(self._steps, None)
        return self._current is None

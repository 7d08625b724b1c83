"""The observer that records what a rank does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.tools.tracing.records import RECORD
from pydtnn.utils._recorder import Course
from pydtnn.utils._recorder import Lane as CompiledLane
from pydtnn.utils.clock import Clock
from pydtnn.utils.observer import Observer

MAX_LANES = 256
"""Threads of a rank that records can distinguish."""


class Lane(CompiledLane, Observer):
    """The records of one of the loader's threads."""


class Recorder(CompiledLane, Observer):
    """Record activities and messages of this rank in memory.

    An observer of a `Trainer`; `pydtnn.tools.tracing.trace_to` writes the records into a folder.

    Parameters
    ----------
    steps : range, optional
        The training steps to record, counted from 0 when training starts or continues; outside of
        them nothing is recorded. By default all that happens.
    clock : Clock, optional
        The clock of a virtual rank; by default that of this machine.

    Attributes
    ----------
    names : list of str
        The names to which records refer.
    lanes : list of str
        Names of the threads.
    sent : int
        Bytes that the communicator has counted while it was recorded, in B; see `count`.
    """

    def __init__(self, steps: range | None = None, clock: Clock | None = None) -> None:
        first, stop = (0, -1) if steps is None else (steps.start, steps.stop)
        self._state = Course(first, stop)
        self._state.clock = clock
        super().__init__(self._state, 0)
        self._others: dict[str, Lane] = {}
        self._sent = 0
        self._counted: Callable[[], int] | None = None
        self._since = 0
        self._state.switched = self._switched

    @property
    def names(self) -> list[str]:
        return list(self._state.names)

    @property
    def lanes(self) -> list[str]:
        return ["main", *self._others]

    def lane(self, name: str) -> Observer:
        if name not in self._others:
            number = len(self._others) + 1
            if number == MAX_LANES:
                return Observer()
            self._others[name] = Lane(self._state, number)
        return self._others[name]

    def watch(self, memory: Any) -> None:
        """Store ``memory.in_use`` at the end of phases and layers.

        Parameters
        ----------
        memory : object or None
            The pool of a backend.
        """
        self._state.memory = memory

    def count(self, sent: Callable[[], int] | None) -> None:
        """Count the bytes that are sent while it is recorded.

        Parameters
        ----------
        sent : callable or None
            Returns the bytes sent so far, in B, as the traffic of a communicator counts them. None:
            the count ends.
        """
        if self._counted is not None and self._state.active:
            self._switched(False)
        self._counted = sent
        if sent is not None and self._state.active:
            self._switched(True)

    def _switched(self, active: bool) -> None:
        if self._counted is not None:
            now = self._counted()
            self._sent += 0 if active else now - self._since
            self._since = now

    @property
    def sent(self) -> int:
        more = 0
        if self._counted is not None and self._state.active:
            more = self._counted() - self._since
        return self._sent + more

    def records(self) -> np.ndarray:
        """Return the records of all threads so far, in the order in which they ended."""
        lanes: list[Any] = [self, *self._others.values()]
        records = np.concatenate([lane.copy(RECORD) for lane in lanes])
        stops = records["start"] + records["duration"]
        return records[np.argsort(stops, kind="stable")]

"""Observers of the threads of a loader."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from itertools import count

from pydtnn.utils.observer import Activity, Kind, Observer


class Lanes:
    """Report the batches that threads prepare, each on a lane of its own.

    Parameters
    ----------
    observer : Observer
    name : str
        Prefix of the names of the lanes. If it is empty, batches are prepared in the thread of
        `observer`.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        self._observer, self._name = observer, name
        self._numbers = count()
        self._own = threading.local()

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which the calling thread prepares a batch."""
        lane = self._observer
        if self._name:
            lane = getattr(self._own, "lane", None) or lane.lane(
                f"{self._name} {next(self._numbers)}"
            )
            self._own.lane = lane
        return Activity(lane, Kind.LOAD, "batch")

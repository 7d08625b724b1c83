"""Reports to an observer of the layers' passes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from pydtnn.model.recompute import Run
from pydtnn.utils.observer import RECOMPUTED, Kind, Observer

Pass = Generator[Any, Any, Any]
"""The pass of a layer, which yields what it asks of other ranks."""


class Reports:
    """Report the passes of the layers of one forward or backward pass of the model.

    Parameters
    ----------
    observer : Observer
    shards : int
        Shards that take turns. If there are several, a layer that waits for other ranks is
        interrupted by other layers: its activity ends, and another one begins when it continues.
    """

    def __init__(self, observer: Observer, shards: int) -> None:
        self._observer, self._interrupted = observer, shards > 1

    @classmethod
    def to(cls, observer: Observer | None, shards: int) -> Reports | None:
        """Return the reports to an observer, None if there is none."""
        return None if observer is None else cls(observer, shards)

    def told(self, run: Pass, kind: Kind, name: str, interrupted: bool = False) -> Pass:
        """Run the pass of a layer as an activity; `interrupted` if others run while it waits."""
        observer = self._observer
        observer.begin(kind, name)
        try:
            if not (self._interrupted or interrupted):
                return (yield from run)
            pending: Any = None
            while True:
                try:
                    asked = run.send(pending)
                except StopIteration as end:
                    return end.value
                observer.end()
                try:
                    pending = yield asked
                finally:
                    observer.begin(kind, name)
        finally:
            observer.end()

    def recomputed(self, run: Callable[..., Pass]) -> Run:
        """Return a function that runs a node again as an activity."""

        def again(node: Any, *args: Any) -> Pass:
            return self.told(run(node, *args), Kind.FORWARD, node.name + RECOMPUTED)

        return again

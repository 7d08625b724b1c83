"""The clock of a virtual rank: it is advanced by what the rank is observed to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydtnn.perfmodel.compute.base import ComputeCosts
from pydtnn.perfmodel.compute.segments import Activities
from pydtnn.perfmodel.engine.engine import Engine
from pydtnn.utils.clock import Clock
from pydtnn.utils.observer import Kind, Observer

PARTS = (Kind.KERNEL, Kind.LOAD)
"""Activities inside segments, which are reported in some runs only."""


class RankClock(Clock, Observer):
    """Virtual time of a rank.

    As an observer, it advances by the cost of the segment that a notification ends. Time inside a
    communicator is that of messages, by which the engine advances it.

    Parameters
    ----------
    engine : Engine
    rank : int
        Number of the rank among all ranks of the run.
    costs : ComputeCosts
    """

    common = True

    def __init__(self, engine: Engine, rank: int, costs: ComputeCosts) -> None:
        self.engine, self._rank, self._costs = engine, rank, costs
        self._activities = Activities()
        self._layers: Mapping[str, Any] = {}
        self._samples = 0
        self._parts = 0  # activities in progress that end no segment

    def now_ns(self) -> int:
        return round(1e9 * self.engine.clock(self._rank))

    def lane(self, name: str) -> Observer:
        """Return an observer of another thread, whose work takes no virtual time."""
        return Observer()

    def layers(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def samples(self, samples: int) -> None:
        self._samples = samples

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind in PARTS:
            self._parts += 1
            return
        self._advance()
        self._activities.begin(kind, name)

    def end(self) -> None:
        if self._parts:
            self._parts -= 1
            return
        self._advance()
        self._activities.end()

    def _advance(self) -> None:
        label = self._activities.ending()
        if label is not None:
            layer = self._layers.get(label.name.removesuffix(" (recomputed)"))
            layer = None if label.kind == "phase" else layer
            self.engine.spend(self._rank, self._costs.seconds(label, layer, self._samples))

"""The clock of a virtual rank: it is advanced by what the rank is observed to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydtnn.tools.perfmodel.compute.base import ComputeCosts, Label
from pydtnn.tools.perfmodel.compute.segments import SegmentObserver
from pydtnn.tools.perfmodel.engine.engine import Engine
from pydtnn.tools.perfmodel.prediction import LayerTime, StepTime
from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.utils.clock import Clock
from pydtnn.utils.observer import Kind, layer_of


class RankClock(Clock, SegmentObserver):
    """Virtual time of a rank, which advances by the cost of the segment that a notification ends.

    Time inside a communicator belongs to no segment: it is that of messages, by which the engine
    advances the clock.

    Parameters
    ----------
    engine : Engine
    rank : int
        Number of the rank among all ranks of the run.
    costs : ComputeCosts
    disturbances : Disturbances

    Attributes
    ----------
    steps : int
        Training steps that have begun.
    """

    common = True

    def __init__(
        self, engine: Engine, rank: int, costs: ComputeCosts, disturbances: Disturbances
    ) -> None:
        super().__init__()
        self.steps = 0
        self.engine, self._rank, self._disturbances = engine, rank, disturbances
        self._costs = costs
        self._known: dict[tuple[Label, int], float] = {}
        self._layers: Mapping[str, Any] = {}
        self._samples = 0
        self._before = 0.0
        self._sums: dict[Label, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def spend(self, seconds: float) -> None:
        """Advance by the time of a segment without disturbances, in s."""
        if self._disturbances is not NONE:
            seconds *= self._disturbances.factor(self.now(), self.steps, self._rank)
        self.engine.spend(self._rank, seconds)

    def layers(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self._known.clear()

    def samples(self, samples: int) -> None:
        self._samples = samples

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        super().begin(kind, name)
        if kind is Kind.PHASE and name == "step":
            self.steps += 1

    def notified(self) -> None:
        label, begin, now = self.ending(), self._before, self.now()
        if label is not None:
            self.spend(self._seconds(label))
        self._before = self.now()
        if named := self.named:
            own = self._sums[named]
            own[0] += self._before - now
            own[1] += now - begin  # in calls of the communicator

    def take(self, steps: int = 1) -> StepTime:
        """Return the mean time of the steps since the last call, and forget them."""
        layers: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        phases: dict[str, float] = defaultdict(float)
        waited = 0.0
        for label, (computed, messages) in self._sums.items():
            if label.kind == "phase":
                phases["update" if label.name == "update" else "other"] += computed / steps
                waited += messages / steps
                continue
            name, part = label.part
            layers[name][part] += computed / steps
            layers[name][3] += messages / steps
        self._sums.clear()
        times = tuple(LayerTime(name, *parts) for name, parts in layers.items())
        return StepTime(times, phases["other"], phases["update"], waited)

    def now(self) -> float:
        return self.engine.clock(self._rank)

    def now_ns(self) -> int:
        return round(1e9 * self.now())

    def _seconds(self, label: Label) -> float:
        """Return the time of a segment, in s."""
        key = label, self._samples
        seconds = self._known.get(key)
        if seconds is None:
            phase = label.kind == "phase"
            layer = None if phase else self._layers.get(layer_of(label.name))
            seconds = self._costs.seconds(label, layer, self._samples)
            if self._costs.constant and layer is not None:
                self._known[key] = seconds
        return seconds

    def pause(self) -> None:
        self.engine.pause(self._rank)

    def add(self, nbytes: int) -> None:
        self.engine.spend(self._rank, nbytes * self.engine.network.add)

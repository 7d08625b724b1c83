"""Where the time of a rank's steps goes, as an observer sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from pydtnn.comm.traffic import Traffic
from pydtnn.perfmodel.compute.segments import COMMUNICATION, NAMES
from pydtnn.utils.observer import RECOMPUTED, Kind, Observer

LOSS, UPDATE = "loss", "update"
"""Phases that are listed by themselves."""


@dataclass
class LayerTimes:
    """Times of one layer in one step, in s.

    Attributes
    ----------
    forward, backward : float
        Compute; a pass that backward recomputes is part of `backward`.
    communication : float
        Calls of the communicator in its passes, also those that make progress with messages of
        other layers.
    """

    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Compute and communication, in s."""
        return self.forward + self.backward + self.communication


@dataclass
class Times:
    """Times of one rank in one step, in s.

    Attributes
    ----------
    layers : dict of str to LayerTimes
        By name; those of convolutions include the layers that are fused into them.
    phases : dict of str to float
        Compute outside of layers, by phase.
    communication : float
        Exposed communication: all time in calls of the communicator.
    step : float
        Duration of the step.
    """

    layers: dict[str, LayerTimes] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    communication: float = 0.0
    step: float = 0.0

    @property
    def compute(self) -> float:
        """Compute of all layers, in s."""
        return sum(layer.forward + layer.backward for layer in self.layers.values())

    @property
    def loss(self) -> float:
        """Compute of the loss, in s."""
        return self.phases.get(LOSS, 0.0)

    @property
    def update(self) -> float:
        """Compute of the update of the parameters, in s."""
        return self.phases.get(UPDATE, 0.0)

    @property
    def other(self) -> float:
        """All that is neither in layers, loss, update nor communication, in s."""
        return self.step - self.compute - self.loss - self.update - self.communication


class Breakdown(Observer):
    """Sum up the times of a rank's activities.

    Parameters
    ----------
    clock : callable
        Returns a time in ns.

    Attributes
    ----------
    traffic : Traffic
        Of the rank's communicator; to be set before the first step.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.traffic = Traffic()
        self._clock = clock
        self._open: list[tuple[Kind, str]] = []
        self._before, self._inside = 0, 0.0
        self._kernels = 0
        self._sums: dict[tuple[Kind, str, bool], float] = defaultdict(float)

    def lane(self, name: str) -> Observer:
        """Return an observer that ignores another thread."""
        return Observer()

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind is Kind.KERNEL:
            self._kernels += 1
            return
        self._add()
        self._open.append((kind, name))

    def end(self) -> None:
        if self._kernels:
            self._kernels -= 1
            return
        self._add()
        self._open.pop()

    def _add(self) -> None:
        now, inside = self._clock(), self.traffic.seconds
        if self._open:
            elapsed, called = 1e-9 * (now - self._before), inside - self._inside
            if self._open[-1][0] in COMMUNICATION:
                called = elapsed
            kind, name = next(one for one in reversed(self._open) if one[0] in NAMES)
            self._sums[kind, name, True] += called
            self._sums[kind, name, False] += elapsed - called
        self._before, self._inside = now, inside

    def take(self, seconds: float, steps: int = 1) -> Times:
        """Return the times since the last call, and forget them; between two steps.

        Parameters
        ----------
        seconds : float
            Duration of a step, in s.
        steps : int
            Number of steps since the last call.
        """
        times = Times(step=seconds)
        for (kind, name, communicates), total in self._sums.items():
            mean = total / steps
            if communicates:
                times.communication += mean
            if kind is Kind.PHASE:
                if not communicates:
                    times.phases[name] = times.phases.get(name, 0.0) + mean
                continue
            again = name.endswith(RECOMPUTED)
            layer = times.layers.setdefault(name.removesuffix(RECOMPUTED), LayerTimes())
            if communicates:
                layer.communication += mean
            elif kind is Kind.FORWARD and not again:
                layer.forward += mean
            else:
                layer.backward += mean
        self._sums.clear()
        return times

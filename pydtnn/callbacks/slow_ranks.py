"""A warning of ranks that are busy longer than the others, with the phase that takes longer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from pydtnn.training.callback import Callback, Training
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind, Observer
from pydtnn.utils.validate import check_float

_log = logging.getLogger("pydtnn.train")


class PhaseTimes(Observer):
    """Adds up the time of each phase, without phases in it and without communication.

    Attributes
    ----------
    seconds : dict of str to float
        Time of each phase, in s.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._timed: list[bool] = []
        self._open: list[tuple[str, float]] = []
        self._inner = [0.0]

    def lane(self, name: str) -> Observer:
        """Return an observer without effect: other threads are not measured."""
        return Observer()

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        timed = kind in (Kind.PHASE, Kind.CALL, Kind.WAIT)
        self._timed.append(timed)
        if timed:
            self._open.append((name if kind == Kind.PHASE else "", clock.now()))
            self._inner.append(0.0)

    def end(self) -> None:
        if self._timed.pop():
            name, start = self._open.pop()
            duration = clock.now() - start
            if name:
                self.seconds[name] += duration - self._inner[-1]
            self._inner.pop()
            self._inner[-1] += duration


class SlowRanks(Callback):
    """Name ranks that are busy longer than the others, once per epoch.

    The logger "pydtnn.train" of rank 0 emits a warning for each rank whose time since the last
    comparison, in all phases but without waiting for other ranks, is more than `factor` times the
    median of the others. The phase is the one with the largest difference: a part of a step, the
    evaluation, a checkpoint, or a callback by its class.

    Parameters
    ----------
    factor : float
        At least 1.
    least : float
        Smaller differences per epoch are not named, in s.

    Attributes
    ----------
    times : PhaseTimes
        To be passed to the trainer: ``Trainer(callbacks=[slow], observers=[slow.times])``.
    """

    reads_gradients = False

    def __init__(self, factor: float = 1.5, *, least: float = 1.0) -> None:
        self.factor = check_float("SlowRanks", "factor", factor, at_least=1)
        self.least = check_float("SlowRanks", "least", least, at_least=0)
        self.times = PhaseTimes()

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Begin to measure."""
        self.times.seconds.clear()

    def on_epoch_end(self, trainer: Training) -> None:
        """Compare the times of all ranks. Collective: all ranks call it."""
        everywhere = trainer.comm.gather_object(dict(self.times.seconds))
        self.times.seconds.clear()
        if trainer.comm.rank == 0:
            for line in slow_ranks(everywhere, self.factor, self.least):
                _log.warning("epoch %d: %s", trainer.epoch, line)


def slow_ranks(
    times: Sequence[Mapping[str, float]], factor: float, least: float = 0.0
) -> list[str]:
    """Return a sentence for each rank that is slower than the median of the others.

    Parameters
    ----------
    times : sequence of mapping of str to float
        Time of each phase on each rank, in s.
    factor, least : float
        See `SlowRanks`.

    Examples
    --------
    >>> slow_ranks([{"data": 1.0, "forward": 4.0}, {"data": 6.0, "forward": 4.0}], 1.5)
    ['rank 1 is busy 2.0 times as long as the others, mostly in data: 6.0 s instead of 1.0 s']
    """
    found = []
    for rank, own in enumerate(times):
        others = [other for place, other in enumerate(times) if place != rank]
        usual = median(sum(other.values()) for other in others) if others else 0.0
        total = sum(own.values())
        if not 0 < factor * usual < total or total - usual < least:
            continue
        of = {name: median(other.get(name, 0.0) for other in others) for name in own}
        name = max(own, key=lambda phase: own[phase] - of[phase])
        found.append(
            f"rank {rank} is busy {total / usual:.1f} times as long as the others, "
            f"mostly in {name}: {own[name]:.1f} s instead of {of[name]:.1f} s"
        )
    return found

"""A warning of ranks that are busy longer than the others, with the part that takes longer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import median

from pydtnn.training.callback import Callback, Training
from pydtnn.utils.validate import check_float

_log = logging.getLogger("pydtnn.train")


class SlowRanks(Callback):
    """Name ranks that are busy longer than the others, once per epoch.

    The logger "pydtnn.train" of rank 0 emits a warning for each rank whose time since the last
    comparison, in steps without their communication and in waiting for data (`Trainer.seconds`), is
    more than `factor` times the median of the others.

    Parameters
    ----------
    factor : float
        At least 1.
    least : float
        Smaller differences per epoch are not named, in s.
    """

    reads_gradients = False

    def __init__(self, factor: float = 1.5, *, least: float = 1.0) -> None:
        self.factor = check_float("SlowRanks", "factor", factor, at_least=1)
        self.least = check_float("SlowRanks", "least", least, at_least=0)
        self._before: dict[str, float] = {}

    def on_epoch_start(self, trainer: Training) -> None:
        """Begin to measure."""
        self._before = _busy(trainer)

    def on_epoch_end(self, trainer: Training) -> None:
        """Compare the times of all ranks. Collective: all ranks call it."""
        own = {part: time - self._before[part] for part, time in _busy(trainer).items()}
        everywhere = trainer.comm.gather_object(own)
        if trainer.comm.rank == 0:
            for line in slow_ranks(everywhere, self.factor, self.least):
                _log.warning("epoch %d: %s", trainer.epoch, line)


def _busy(trainer: Training) -> dict[str, float]:
    """Return the time of a rank that is not spent for others, in s."""
    seconds = trainer.seconds
    return {"steps": seconds["steps"] - seconds["communication"], "data": seconds["data"]}


def slow_ranks(
    times: Sequence[Mapping[str, float]], factor: float, least: float = 0.0
) -> list[str]:
    """Return a sentence for each rank that is slower than the median of the others.

    Parameters
    ----------
    times : sequence of mapping of str to float
        Time of each part on each rank, in s.
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

"""Times and memory of the steps of a run, as measured."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.training.callback import Callback, Training
from pydtnn.utils.machine import recent_peak_memory, resident_memory, restart_peak

BUSY = "the machine is busy: half of the steps differ from their median by more than {:.0%}"
AWAY = "the machine is busy: ranks have no core for {:.0%} of their time"
"""Why steps predict nothing."""

MAX_SPREAD = 0.25
"""Spread of steps, see `StepMeter.times`, and part of their time without a core, above which they
predict nothing."""


class StepMeter(Callback):
    """Times of all steps, and growth of this process in those of its first epoch.

    The growth is that before evaluations and checkpoints. The first step of several does not count:
    algorithms are chosen, and times are measured, before it and within it.

    Attributes
    ----------
    grown : int
        In B, compared with the time when this object was made.
    """

    reads_gradients = False

    def __init__(self) -> None:
        self.grown = 0
        self._before, self._steps, self._first = resident_memory(), 0, True
        self._seconds: dict[str, float] = {}
        self._times: dict[str, array[float]] = {name: array("d") for name in (*TIMES, "cpu")}

    def without_growth(self, function: Callable[[], Any]) -> Any:
        """Call a function, such as an import, whose memory is not that of steps."""
        before = resident_memory()
        result = function()
        self._before += max(resident_memory() - before, 0)
        return result

    def on_epoch_start(self, trainer: Training) -> None:
        """Times of evaluations are not those of steps."""
        self._seconds = self._now(trainer)

    def _now(self, trainer: Training) -> dict[str, float]:
        return {**trainer.seconds, "cpu": time.thread_time()}

    def on_step_end(self, trainer: Training) -> None:
        """Read the times and the peak; let it begin anew after the first step."""
        now = self._now(trainer)
        for name, times in self._times.items():
            times.append(now[name] - self._seconds.get(name, 0.0))
        self._seconds = now
        if self._first:
            self.grown = max(recent_peak_memory() - self._before, 0)
            self._steps += 1
            if self._steps == 1:
                restart_peak()

    def on_epoch_end(self, trainer: Training) -> None:
        """Stop: evaluations have other arrays."""
        self._first = False

    def times(self, begin: int = 1, end: int | None = None) -> dict[str, float]:
        """Return the times of a step in s, and its memory in B.

        "seconds" with "low" and "high" are the median and the first and last decile of the steps
        from `begin` to `end`, by default all but the first, "compute", "communication" and "data"
        the parts of the median, "spread" half the distance between the quartiles over the median,
        "away" the part of their compute in which the rank had no core, and "first" the first step;
        empty if there was no step.
        """
        steps, communication, data, cpu = (np.array(own) for own in self._times.values())
        if not len(steps):
            return {}
        warm = slice(min(begin, len(steps) - 1), end)
        low, quarter, whole, rest, high = _quantiles(
            (steps + data)[warm], 0.1, 0.25, 0.5, 0.75, 0.9
        )
        parts = {
            "communication": _quantiles(communication[warm], 0.5)[0],
            "data": _quantiles(data[warm], 0.5)[0],
        }
        return {
            "seconds": whole,
            "low": low,
            "high": high,
            "away": max(1 - float(sum(cpu[warm]) / sum((steps - communication)[warm])), 0.0),
            "spread": (rest - quarter) / 2 / whole,
            "compute": max(whole - sum(parts.values()), 0.0),
            **parts,
            "first": float(steps[0] + data[0]),
            "memory": float(self.grown),
        }

    def after(self, warm: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the times of so many steps after the first one, and of the steps after these.

        The former are empty, and the latter those of all but the first, if there are not as many.
        """
        if not warm or len(self._times["steps"]) < warm + 2:
            return {}, self.times()
        return self.times(1, warm + 1), self.times(warm + 1)


def _quantiles(values: NDArray[Any], *shares: float) -> list[float]:
    """Return the same as np.quantile, which imports masked arrays: a fiftieth of a short run."""
    return np.interp(shares, np.linspace(0, 1, len(values)), np.sort(values)).tolist()


TIMES = ("steps", "communication", "data")
"""Entries of `Trainer.seconds` that are measured step by step."""

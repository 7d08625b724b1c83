"""Times and memory of the steps of a run, as measured."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.training.callback import Callback, Training
from pydtnn.utils.machine import recent_peak_memory, resident_memory, restart_peak


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
        self._times: dict[str, array[float]] = {name: array("d") for name in TIMES}

    def without_growth(self, function: Callable[[], Any]) -> Any:
        """Call a function, such as an import, whose memory is not that of steps."""
        before = resident_memory()
        result = function()
        self._before += max(resident_memory() - before, 0)
        return result

    def on_epoch_start(self, trainer: Training) -> None:
        """Times of evaluations are not those of steps."""
        self._seconds = dict(trainer.seconds)

    def on_step_end(self, trainer: Training) -> None:
        """Read the times and the peak; let it begin anew after the first step."""
        for name, times in self._times.items():
            times.append(trainer.seconds[name] - self._seconds.get(name, 0.0))
        self._seconds = dict(trainer.seconds)
        if self._first:
            self.grown = max(recent_peak_memory() - self._before, 0)
            self._steps += 1
            if self._steps == 1:
                restart_peak()

    def on_epoch_end(self, trainer: Training) -> None:
        """Stop: evaluations have other arrays."""
        self._first = False

    def times(self) -> dict[str, float]:
        """Return the times of a step in s, and its memory in B.

        "seconds" with "low" and "high" are the median and the first and last decile of all steps
        but the first, "compute", "communication" and "data" the parts of the median, and "first"
        the first step; empty if there was no step.
        """
        steps, communication, data = (np.array(self._times[name]) for name in TIMES)
        if not len(steps):
            return {}
        warm = slice(min(1, len(steps) - 1), None)
        low, whole, high = _quantiles((steps + data)[warm], 0.1, 0.5, 0.9)
        parts = {
            "communication": _quantiles(communication[warm], 0.5)[0],
            "data": _quantiles(data[warm], 0.5)[0],
        }
        return {
            "seconds": whole,
            "low": low,
            "high": high,
            "compute": max(whole - sum(parts.values()), 0.0),
            **parts,
            "first": float(steps[0] + data[0]),
            "memory": float(self.grown),
        }


def _quantiles(values: NDArray[Any], *shares: float) -> list[float]:
    """Return the same as np.quantile, which imports masked arrays: a fiftieth of a short run."""
    return np.interp(shares, np.linspace(0, 1, len(values)), np.sort(values)).tolist()


TIMES = ("steps", "communication", "data")
"""Entries of `Trainer.seconds` that are measured step by step."""

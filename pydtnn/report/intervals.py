"""Parts of an epoch: what a run has measured in each, and fewer of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Intervals:
    """The intervals of an epoch, as arrays of equal length.

    Attributes
    ----------
    epoch : int
        Counted from 1.
    step : ndarray
        Last step of each interval, counted from 1.
    seconds, samples : ndarray
        Duration in s, and samples of all ranks.
    loss, lr : ndarray
        Mean training loss, NaN if it is not finite, and learning rate.
    """

    epoch: int
    step: np.ndarray
    seconds: np.ndarray
    samples: np.ndarray
    loss: np.ndarray
    lr: np.ndarray

    @property
    def steps(self) -> int:
        """Number of steps that the intervals cover; the first may be cut off by resuming."""
        first = self.step[1] - self.step[0] if len(self.step) > 1 else self.step[0]
        return round(self.step[-1] - self.step[0] + min(first, self.step[0]))

    def position(self) -> np.ndarray:
        """Return the number of epochs completed at the end of each interval, with fractions."""
        return self.epoch - 1 + self.step / self.step[-1]

    def rates(self) -> list[float]:
        """Return the samples per second of each interval."""
        return [*(self.samples / self.seconds)]

    def merged(self, count: int) -> Intervals:
        """Return at most `count` intervals, each of which consists of neighbours."""
        size = len(self.step)
        if size <= count:
            return self
        first = np.unique(np.arange(count) * size // count)
        last = np.append(first[1:], size) - 1
        return Intervals(
            self.epoch,
            self.step[last],
            np.add.reduceat(self.seconds, first),
            np.add.reduceat(self.samples, first),
            np.add.reduceat(self.loss, first) / (last - first + 1),
            self.lr[last],
        )


def read_intervals(epoch: int, columns: Mapping[str, Sequence[Any]]) -> Intervals:
    """Return the intervals of a line of ``measurements.jsonl``.

    Raises
    ------
    ValueError, TypeError, LookupError, OverflowError
        If a column is missing or invalid.
    """
    names = "step", "seconds", "samples", "loss", "lr"
    arrays = [np.array(columns[name], float) for name in names]
    lengths = {array.shape for array in arrays}
    step, seconds, samples, _, _ = arrays
    if len(lengths) != 1 or step.ndim != 1 or not step.size:
        raise ValueError("the columns must be lists of equal length")
    if not (np.diff(step, prepend=0) > 0).all() or not (seconds > 0).all():
        raise ValueError("steps must increase and durations must be positive")
    if not np.isfinite([step, seconds, samples]).all():
        raise ValueError("numbers must be finite")
    return Intervals(epoch, *arrays)

"""Running statistics of batch norm: sums collected during a step, folded in once at its end.

During a step every batch norm adds the count, sum and sum of squares of what it saw to one flat
array; over micro-batches and shards these simply add up. `RunningStatistics.update` then moves the
running means and variances of all layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Statistic:
    """Running mean and variance of one layer's channels.

    Parameters
    ----------
    name : str
        Dotted name of the layer.
    channels : int
    momentum : float
        Weight of a new step: ``running = (1 - momentum) running + momentum new``.

    Attributes
    ----------
    sums : ndarray, shape (1 + 2 C,), float64
        Count, sums and sums of squares of this step so far.
    mean, variance : ndarray, shape (C,), float64
        Running values; the variance is the unbiased one.
    """

    def __init__(self, name: str, channels: int, momentum: float) -> None:
        self.name = name
        self.channels = channels
        self.momentum = momentum
        self.sums: np.ndarray
        self.mean: np.ndarray
        self.variance: np.ndarray


class RunningStatistics:
    """The statistics of all layers of a model in flat float64 arrays.

    Attributes
    ----------
    sums : ndarray
        This step's sums of all layers, each ``(count, sum x, sum x^2)``.
    running : ndarray
        Running means of all channels, then running variances.
    samples : float
        Rows seen since ranks last averaged: the weight of this rank's `running`.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        channels = [s.channels for s in self.statistics]
        total = sum(channels)
        self.sums = np.zeros(len(channels) + 2 * total)
        self.running = np.concatenate([np.zeros(total), np.ones(total)])
        self.samples = 0.0
        self._momentum = np.array([s.momentum for s in self.statistics for _ in range(s.channels)])
        # where in `sums` each channel finds its layer's count, its sum and its sum of squares
        indices = np.empty((3, total), np.int64)
        start = first = 0
        for s in self.statistics:
            stop, last = start + 1 + 2 * s.channels, first + s.channels
            s.sums = self.sums[start:stop]
            s.mean = self.running[first:last]
            s.variance = self.running[total + first : total + last]
            own = np.arange(s.channels)
            indices[:, first:last] = [
                own * 0 + start,
                own + start + 1,
                own + start + 1 + s.channels,
            ]
            start, first = stop, last
        self._indices = indices

    def begin_step(self) -> None:
        """Forget the sums of a step that was not completed, and of forwards outside of any."""
        self.sums[:] = 0

    def update(self) -> None:
        """Fold this step's sums into the running values and clear them; what saw nothing stays."""
        if not len(self.running):
            return
        count, total, squares = self.sums[self._indices]
        seen = count > 0
        n = np.maximum(count, 1)
        mean = total / n
        variance = np.maximum(squares / n - mean * mean, 0) * n / np.maximum(n - 1, 1)
        momentum = np.where(seen, self._momentum, 0)
        running = self.running.reshape(2, -1)
        running += momentum * (np.stack([mean, variance]) - running)
        self.samples += float(count[0])
        self.sums[:] = 0

    def state(self) -> dict[str, np.ndarray]:
        """Running means and variances by name."""
        result = {}
        for s in self.statistics:
            result[f"{s.name}.running_mean"] = s.mean
            result[f"{s.name}.running_variance"] = s.variance
        return result

"""Efficiencies of a parallel run, as defined by POP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.analysis.blocks import Blocks, find_blocks
from pydtnn.tracing.analysis.replay import replay
from pydtnn.tracing.timeline import Steps, Timeline


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies of the training steps; 1 is ideal.

    Useful time U is that of the main thread outside of the communicator; the wait for a batch is
    part of it. T is the time of the steps, and T' the time that they would take on a network on
    which messages and calls take no time (`replay`).

    Attributes
    ----------
    runtime : float
        T, in s.
    ideal_runtime : float
        T', in s.
    useful : ndarray of float, shape ``(ranks,)``
        U of each rank, in s.

    References
    ----------
    POP Standard Metrics for Parallel Performance Analysis, Performance Optimisation and
    Productivity Centre of Excellence, https://pop-coe.eu/node/69; Rosas, C., Giménez, J. and
    Labarta, J., Scalability prediction for fundamental performance factors, Supercomputing
    Frontiers and Innovations 1 (2), 2014.
    """

    runtime: float
    ideal_runtime: float
    useful: np.ndarray

    @property
    def parallel(self) -> float:
        """Mean of U over T: load balance x serialisation x transfer."""
        return float(self.useful.mean()) / self.runtime

    @property
    def load_balance(self) -> float:
        """Mean of U over its maximum."""
        return float(self.useful.mean() / self.useful.max())

    @property
    def communication(self) -> float:
        """Maximum of U over T: serialisation x transfer."""
        return float(self.useful.max()) / self.runtime

    @property
    def serialisation(self) -> float:
        """Maximum of U over T': the loss because ranks depend on each other."""
        return float(self.useful.max()) / self.ideal_runtime

    @property
    def transfer(self) -> float:
        """T' over T: the loss because messages and calls take time."""
        return self.ideal_runtime / self.runtime


def efficiency(timeline: Timeline, blocks: Blocks | None = None) -> Efficiency | None:
    """Return the efficiencies of the training steps.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.

    Returns
    -------
    Efficiency or None
        None if no training step was recorded. The times are summed over the parts of the run that
        consist of consecutive steps of an epoch.
    """
    blocks = blocks or find_blocks(timeline)
    runtime, ideal, useful = 0, 0, np.zeros(timeline.size)
    for first, last in _parts(timeline.steps):
        start, stop = timeline.steps.start[first], timeline.steps.stop[last]
        runtime += int(stop.max() - start.min())
        ideal += int(replay(timeline, blocks, start, stop).max() - start.min())
        for rank in range(timeline.size):
            here = blocks.rank == rank
            begin = np.clip(blocks.start[here], start[rank], stop[rank])
            end = np.clip(blocks.stop[here], start[rank], stop[rank])
            useful[rank] += stop[rank] - start[rank] - (end - begin).sum()
    return Efficiency(runtime / 1e9, ideal / 1e9, useful / 1e9) if runtime else None


def _parts(steps: Steps) -> list[tuple[int, int]]:
    """Return the first and the last of consecutive steps of an epoch."""
    if not len(steps):
        return []
    breaks = np.flatnonzero((np.diff(steps.epochs) != 0) | (np.diff(steps.numbers) != 1))
    firsts = np.append(0, breaks + 1)
    lasts = np.append(breaks, len(steps) - 1)
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

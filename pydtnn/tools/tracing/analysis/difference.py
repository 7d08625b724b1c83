"""Two runs: what became slower or faster, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import label
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind

MIN_STEPS = 5
"""Complete steps of each run from which noise is estimated."""


@dataclass(frozen=True)
class Change:
    """A layer, phase or communication in two runs.

    Attributes
    ----------
    kind : Kind
    name : str
    before, after : float
        Time per step, the mean of the ranks, in s: median over the steps. 0 where a run does not
        have it.
    noise : float
        Standard error of the difference, from the spread over the steps, in s; NaN if one of the
        runs has fewer than `MIN_STEPS`.
    """

    kind: Kind
    name: str
    before: float
    after: float
    noise: float

    @property
    def difference(self) -> float:
        """`after` - `before`, in s."""
        return self.after - self.before

    @property
    def significant(self) -> bool:
        """Whether the difference is greater than three times the noise."""
        return abs(self.difference) > 3 * self.noise


def compare(before: Timeline, after: Timeline) -> list[Change]:
    """Compare the steps of two runs.

    Parameters
    ----------
    before, after : Timeline
        They may differ in ranks and steps.

    Returns
    -------
    list of Change
        Sorted by the absolute difference, the greatest first.

    Raises
    ------
    ValueError
        If one of them has no training step.
    """
    both = []
    for which, timeline in (("first", before), ("second", after)):
        if not len(timeline.steps):
            raise ValueError(
                f"trace compare: the {which} trace has no complete training step; trace more steps"
            )
        labels = label(timeline)
        per_step = labels.seconds(timeline).mean(axis=2)  # (labels, steps)
        both.append(dict(zip(labels.table, per_step, strict=True)))
    few = min(len(before.steps), len(after.steps)) < MIN_STEPS
    found = []
    for kind, name in dict.fromkeys([*both[0], *both[1]]):
        series = [run.get((kind, name), np.zeros(1)) for run in both]
        first, second = (float(np.median(one)) for one in series)
        if not first and not second:
            continue
        noise = np.nan if few else sum(_standard_error(one) ** 2 for one in series) ** 0.5
        found.append(Change(kind, name, first, second, noise))
    return sorted(found, key=lambda change: -abs(change.difference))


def step_durations(timeline: Timeline) -> np.ndarray:
    """Return the duration of each step, the mean of the ranks, shape ``(steps,)``, in s."""
    return (timeline.steps.stop - timeline.steps.start).mean(axis=1) / 1e9


def _standard_error(series: np.ndarray) -> float:
    """Return the standard error of a median, from the median absolute deviation."""
    deviation = 1.4826 * float(np.median(np.abs(series - np.median(series))))
    return 1.2533 * deviation / len(series) ** 0.5

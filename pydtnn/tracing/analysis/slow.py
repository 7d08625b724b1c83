"""Ranks that are slower than the others, and in which layer or phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.analysis.labels import COMMUNICATION, Labels, beyond_others, label
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


@dataclass(frozen=True)
class Slow:
    """A layer or phase in which a rank is slower than the other ranks.

    Attributes
    ----------
    rank : int
    kind : Kind
    name : str
    seconds : float
        What the rank needs per step, in s: median over the steps.
    others : float
        What the other ranks need, in s: median over these ranks and the steps.
    excess : float
        What the rank needs beyond the median of the other ranks, in s: median over the steps.
    share : float
        `excess` over the duration of a step.
    """

    rank: int
    kind: Kind
    name: str
    seconds: float
    others: float
    excess: float
    share: float


def slow_ranks(
    timeline: Timeline, labels: Labels | None = None, *, least: float = 0.02
) -> list[Slow]:
    """Return what is slower on a rank than on the others, sorted by excess, the greatest first.

    Calls, waits and messages do not count: a rank that is slow makes the others wait.

    Parameters
    ----------
    timeline : Timeline
    labels : Labels, optional
        Default: `label`.
    least : float, default 0.02
        Minimum of `Slow.share`. In four of five steps, the excess must also be at least half of
        this: a rank that the operating system interrupts now and then is not slow. With fewer than
        three steps, none is named.
    """
    labels = labels or label(timeline)
    duration = timeline.steps.duration / 1e9
    if timeline.size == 1 or len(timeline.steps) < 3:
        return []
    seconds = labels.seconds(timeline)
    excess = beyond_others(seconds)
    typical = np.median(excess, axis=1)  # (labels, ranks)
    usual = np.quantile(excess, 0.2, axis=1, method="lower")
    named = (typical > least * duration) & (usual > least / 2 * duration)
    found = []
    for code, rank in np.argwhere(named).tolist():
        if labels.table[code] != COMMUNICATION:
            median = float(np.median(seconds[code, :, rank]))
            others = float(np.median(np.delete(seconds[code], rank, axis=1)))
            more = float(typical[code, rank])
            found.append(Slow(rank, *labels.table[code], median, others, more, more / duration))
    return sorted(found, key=lambda slow: -slow.excess)

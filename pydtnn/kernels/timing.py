"""Timing of candidates on a machine that may run other processes."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

BUDGET = 0.04
"""Seconds for all candidates together, after a first call of each."""

PATIENCE = 0.4
"""Maximum seconds on a machine with constant disturbances."""

ROUNDS = (3, 25)
"""Minimum and maximum number of measurements of each candidate."""


UNDISTURBED = 2
"""Required calls of a candidate without a disturbance."""


def switches() -> int:
    """Count the involuntary context switches of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def shortest_times(
    candidates: tuple[str, ...],
    run: Callable[[str], object],
    clock: Callable[[], float] = time.perf_counter,
    disturbances: Callable[[], int] = switches,
) -> dict[str, float]:
    """Time candidates alternately; return the shortest time of each, in s.

    Other processes increase times; as candidates alternate, all are affected equally. A call during
    which a thread lost its core is discarded, as its time is not meaningful, in particular with
    several threads. A candidate with too few valid calls has an infinite time.
    """
    for name in candidates:  # warm up pages and caches
        run(name)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    least, most = ROUNDS
    began = clock()
    for done in range(1, most + 1):
        for name in candidates:
            before, start = disturbances(), clock()
            run(name)
            took = clock() - start
            if disturbances() == before:
                times[name].append(took)
        known = min(map(len, times.values())) >= UNDISTURBED
        if done >= least and clock() - began >= (BUDGET if known else PATIENCE):
            break
    return {name: min(t) if len(t) >= UNDISTURBED else math.inf for name, t in times.items()}

"""How long candidates take, on a machine that may have other things to do."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

BUDGET = 0.04
"""Seconds for all candidates together, after a first call of each."""

PATIENCE = 0.4
"""Seconds after which a machine that keeps disturbing is given up."""

ROUNDS = (3, 25)
"""Times that each candidate is measured: at least, whatever the budget; and at most."""


UNDISTURBED = 2
"""Calls without a disturbance that a candidate must have had."""


def switches() -> int:
    """Count the times that the system has taken a core away from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def shortest_times(
    candidates: tuple[str, ...],
    run: Callable[[str], object],
    clock: Callable[[], float] = time.perf_counter,
    disturbances: Callable[[], int] = switches,
) -> dict[str, float]:
    """Time candidates in turns; return the shortest time of each, in s.

    Whatever else the machine does adds to a time, and in turns it adds to all alike. A call that
    lost a core on the way says nothing, above all with several threads that wait for each other: it
    is not counted. A candidate that was hardly ever left alone has an infinite time.
    """
    for name in candidates:  # pages, caches and instructions come in
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

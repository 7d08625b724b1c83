"""The share of time that checkpoints take on many hosts, by interval and level.

A host fails after `MTBF_HOST` on average, so the run after that divided by the hosts. Checkpoints
of an interval t that delay training by C, and a failure every M, take C / t for writing and, of
each M, half of an interval and a restart R: Daly, FGCS 22(3), 2006.
"""

from __future__ import annotations

from typing import NamedTuple

from pydtnn.tools.perfmodel.platform import Storage
from pydtnn.utils.interval import optimal_interval

RANKS, RANKS_PER_HOST = 1024, 4
MTBF_HOST = 1000 * 86400.0
"""In s: 1,000 days."""

SHARED, LOCAL, COPY = 10e9, 2e9, 5e9
"""Rates of the shared file system, a disk of a host, and the cache of its system, in B/s."""

INTERVALS = {"1 min": 60.0, "5 min": 300.0, "1 h": 3600.0, "auto": None}


class Share(NamedTuple):
    """Of one interval and level: the delay in s, the interval in s, and the share of time."""

    delay: float
    interval: float
    share: float


def levels(nbytes: float) -> dict[str, tuple[float, float]]:
    """Return for each level the delay of a checkpoint, and the time until it is written, in s."""
    hosts = RANKS // RANKS_PER_HOST
    shared = Storage(write=SHARED).checkpoint(nbytes)
    local = Storage(write=LOCAL).checkpoint(nbytes / hosts)
    copy = Storage(write=COPY).checkpoint(nbytes / hosts)
    return {
        "shared, at once": (shared, shared),
        "shared, in the background": (copy, shared),
        "local disks, at once": (local, local),
        "local disks, in the background": (copy, local),
    }


def shares(nbytes: float) -> dict[str, dict[str, Share]]:
    """Return the share of time by level and interval, for a checkpoint of so many bytes."""
    mtbf = MTBF_HOST / (RANKS // RANKS_PER_HOST)
    result: dict[str, dict[str, Share]] = {}
    for level, (delay, written) in levels(nbytes).items():
        result[level] = {}
        for name, given in INTERVALS.items():
            interval = given or max(optimal_interval(delay, mtbf), written, 1.0)
            interval = max(interval, written)  # the next one waits for it
            restart = written  # what was written is read
            share = delay / interval + (interval / 2 + restart) / mtbf
            result[level][name] = Share(delay, interval, share)
    return result

"""Repeated measurements of a quantity, and whether the machine was under load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NOISY = 0.25
"""Spread of a time above which other work disturbed it."""


@dataclass(frozen=True)
class Sample:
    """Times of the same work.

    Attributes
    ----------
    name : str
        Of the quantity.
    times : tuple of float
        In s.
    elapsed : tuple of float
        Wall times, in s, if `times` are those of the processor.
    limit : float
        Spread above which other work disturbed it.
    """

    name: str
    times: tuple[float, ...]
    elapsed: tuple[float, ...] = ()
    limit: float = NOISY

    @property
    def shortest(self) -> float:
        """The time without disturbances, in s."""
        return min(self.times)

    @property
    def spread(self) -> float:
        """Excess of the median wall time over the shortest, as a part of the latter.

        >>> Sample("x", (1.0, 1.1, 5.0)).spread
        0.10000000000000009
        """
        return excess(self.elapsed or self.times)


def excess(times: Sequence[float]) -> float:
    """Return the excess of the median over the shortest time, as a part of the latter."""
    return statistics.median(times) / min(times) - 1


def processor_clock(threads: int) -> Callable[[], float]:
    """Return the clock for kernels: of one thread it is the time for which it has the core.

    It does not depend on how often other processes interrupt it.

    >>> [processor_clock(threads).__name__ for threads in (1, 2)]
    ['thread_time', 'perf_counter']
    """
    return time.thread_time if threads == 1 else time.perf_counter


def sample(
    name: str,
    work: Callable[[], object],
    repeats: int = 15,
    together: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    limit: float = NOISY,
) -> Sample:
    """Time work several times, after one call that is not counted.

    Parameters
    ----------
    name : str
    work : callable
    repeats : int
    together : callable
        Called before each repetition, such as a barrier.
    clock : callable
        Current time, in s; the spread is that of wall times.
    limit : float
        See `Sample`.
    """
    work()
    times, elapsed = [], []
    for _ in range(repeats):
        together()
        begun, start = time.perf_counter(), clock()
        work()
        times.append(clock() - start)
        elapsed.append(time.perf_counter() - begun)
    return Sample(name, tuple(times), tuple(elapsed), limit)


def noisy(samples: Sequence[Sample]) -> list[str]:
    """Return a phrase for each quantity with a spread above its limit, the largest first.

    Of several samples of a quantity, as of several ranks, the one with the largest spread counts.

    >>> noisy([Sample("copy", (1.0, 2.0, 2.0)), Sample("product", (1.0, 1.0))])
    ['copy by 100 %']
    """
    largest: dict[str, float] = {}
    for one in samples:
        if one.spread > max(one.limit, largest.get(one.name, 0.0)):
            largest[one.name] = one.spread
    ordered = sorted(largest.items(), key=lambda item: -item[1])
    return [f"{name} by {100 * spread:.0f} %" for name, spread in ordered]

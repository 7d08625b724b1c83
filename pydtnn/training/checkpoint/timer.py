"""A time between checkpoints, on which all ranks agree without a message per step."""

from __future__ import annotations

from pydtnn.comm import Communicator
from pydtnn.utils import clock
from pydtnn.utils.interval import optimal_interval

FIRST_STEPS = 10
"""Steps before the first checkpoint of `AUTO`, whose cost is measured."""

LEAST_SECONDS = 1.0
"""Shortest interval that `AUTO` chooses."""


class Timer:
    """Decides on all ranks alike after which steps a time has passed, by the clock of rank 0.

    Ranks agree at few steps only: at each, the time that is left is converted to steps, and they
    agree again after half of them, or after as many steps as there were.

    Parameters
    ----------
    seconds : float or None
        The interval. None: by `optimal_interval`, after `FIRST_STEPS` steps.
    mtbf : float
        See `optimal_interval`, in s.
    """

    def __init__(self, seconds: float | None, mtbf: float) -> None:
        self.seconds = seconds
        self._auto = seconds is None
        self._mtbf = mtbf
        self._begin, self._steps, self._look = clock.now(), 0, 1

    def restart(self, cost: float = 0.0, written: float = 0.0) -> None:
        """Begin an interval, after a checkpoint.

        Parameters
        ----------
        cost : float
            Seconds by which it has delayed training.
        written : float
            Seconds in which one is written completely, before which the next one would wait.
        """
        self._begin, self._steps, self._look = clock.now(), 0, 1
        if self._auto and cost > 0:
            self.seconds = max(optimal_interval(cost, self._mtbf), written, LEAST_SECONDS)

    def is_due(self, comm: Communicator) -> bool:
        """Return whether the interval has passed, after each step. Collective at some steps."""
        self._steps += 1
        if self._auto and self.seconds is None:
            return self._steps >= FIRST_STEPS
        if self._steps < self._look:
            return False
        passed, seconds = comm.gather_object((clock.now() - self._begin, self.seconds))[0]
        left, step = seconds - passed, passed / self._steps
        if left <= step / 2:
            return True
        half = int(left / max(2 * step, 1e-9))
        self._look = self._steps + max(1, min(half, self._steps))  # steps may become slower
        return False

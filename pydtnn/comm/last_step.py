"""The last step of a run that a signal ends, on this rank: see `pydtnn.comm.monitor.monitor`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PATIENCE = 20.0
"""Seconds in which the step in progress must be complete; then the run ends without it."""


TWICE = 0.5
"""Seconds in which a second signal is the same one, sent by the terminal and by a shell."""

FORWARDED = 2.0
"""The same with several ranks: batch systems send a signal to the ranks and to their launcher,
which forwards it, on a busy machine more than half a second later."""


class Last(NamedTuple):
    """The last step: its number among those begun, and the signal, with the rank that it reached.

    Attributes
    ----------
    step : int
        -1 if a rank is not in training, so that the run ends at once.
    signal, rank : int
    """

    step: int
    signal: int
    rank: int


class LastStep:
    """Counts the steps that this rank begins, and holds it until all ranks know the last one.

    Parameters
    ----------
    ask : callable, optional
        Asks for the end of the run, with the signal; returns whether that is possible. By default
        there is no other rank.

    Attributes
    ----------
    reached : bool
        Whether the last step is complete on this rank.
    twice : float
        Seconds in which a second signal is the same one.
    """

    def __init__(self, ask: Callable[[int], bool] | None = None) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._active = self._held = self._abandoned = False
        self._begun = 0
        self._last: Last | None = None
        self._asked_at: float | None = None
        self.reached = False
        self.twice = TWICE if ask is None else FORWARDED

    def start(self) -> None:
        """Allow the run to end after a step from now on; called when training starts."""
        with self._changed:
            self._active = True
            self._last = self._asked_at = None
            self.reached = False

    def stop(self) -> None:
        """The run ends at once from now on; called when training has ended."""
        with self._changed:
            self._active = False

    def passed(self) -> Last | None:
        """Called before each step and after the last one: return the end if it has been reached.

        Waits while the ranks agree on it.
        """
        with self._changed:
            while self._held:
                self._changed.wait()
            if self._last is not None and 0 <= self._last.step <= self._begun:
                self.reached = True
                self._active = False
                return self._last
            self._begun += 1
            return None

    def request(self, signal: int) -> bool:
        """Ask for the end after the step in progress; return whether that is possible now.

        A later signal ends the run at once. If the end has been decided because of another rank,
        this one's first signal is the same, however late it arrives: launchers and batch systems
        send it to each.
        """
        with self._changed:
            now = time.monotonic()
            if self._last is not None and self._last.step >= 0 and self._asked_at is None:
                self._asked_at = now
                return True
            if (
                not self._active
                or self._abandoned
                or (self._asked_at is not None and now > self._asked_at + self.twice)
            ):
                return False
            self._asked_at = self._asked_at or now
            if self._ask is None:
                self._last = self._last or Last(self._begun, signal, 0)
        return self._ask is None or self._ask(signal)

    def overdue(self) -> bool:
        """Return whether the step that `request` waits for has not been completed in time."""
        since = self._asked_at
        if since is None or self.reached:
            return False
        return self._abandoned or time.monotonic() > since + PATIENCE

    def hold(self) -> int:
        """Begin no further step; return the number of those begun, or -1 outside of training."""
        with self._changed:
            self._held = self._active and not self._abandoned
            return self._begun if self._held else -1

    def abandon(self) -> None:
        """Give up agreement, as a rank has failed: a signal ends the run at once."""
        with self._changed:
            self._held, self._abandoned = False, True
            self._changed.notify_all()

    def decide(self, last: Last) -> None:
        """End after this step, unless this rank has gone on without agreement."""
        with self._changed:
            self._held = False
            if not self._abandoned:
                self._last = last
            self._changed.notify_all()

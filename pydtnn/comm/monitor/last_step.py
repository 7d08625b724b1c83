"""Agreement of all ranks on the last step of a run that a signal ends.

Ranks send no message for it while they train. When a rank is signalled, every rank is asked how
many steps it has begun, and begins no other until all have answered; the largest number is the last
step. No rank has then begun a later one, and none waits for another in an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SETTLED = 20.0
"""Seconds after a decision in which requests are part of it: ranks may not have received it yet."""


class LastStep:
    """Agreement of the ranks, in the process that watches those of the first host.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    tell : callable
        Sends a line to every rank.
    """

    def __init__(self, ranks: int, tell: Callable[[str], None]) -> None:
        self._ranks, self._tell = ranks, tell
        self._asked: tuple[int, int] | None = None  # signal, rank
        self._begun: dict[int, int] = {}
        self._settled_at = 0.0

    def request(self, signal: int, rank: int) -> None:
        """End the run, as a rank has received a signal; later ones are part of the same request."""
        if self._asked is None and time.monotonic() > self._settled_at:
            self._asked = signal, rank
            self._tell("freeze")

    def give_up(self) -> None:
        """End the run at once if it is to end: not all ranks can answer."""
        if self._asked is not None:
            self._decide(-1)

    def answer(self, rank: int, begun: int) -> None:
        """Store how many steps a rank has begun; -1 if it is not in training."""
        if self._asked is None:
            return
        self._begun[rank] = begun
        if len(self._begun) == self._ranks:
            steps = self._begun.values()
            self._decide(max(steps) if min(steps) >= 0 else -1)

    def _decide(self, step: int) -> None:
        assert self._asked is not None
        signal, first = self._asked
        self._settled_at = time.monotonic() + SETTLED if step >= 0 else 0.0
        self._asked = None
        self._begun.clear()
        self._tell(f"last {step} {signal} {first}")

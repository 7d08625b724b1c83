"""Messages that are in progress while a rank computes.

MPI and the executor of schedules make progress only while they are called: the next round of a
collective begins at the next call after the messages of the last one have arrived. All ranks are
assumed to be alike, so that one rank, its processor and its share of the links are followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_ROUNDS = 32
"""Rounds of an operation that are followed one by one; more are merged."""


class Round(NamedTuple):
    """A round of a collective.

    Attributes
    ----------
    latency : float
        Time of an empty message, in s.
    transfer : float
        Time for which the link is busy, in s.
    work : float
        Time of the processor: calls, copies and additions, in s.
    """

    latency: float
    transfer: float
    work: float


def merged(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Return at most `MAX_ROUNDS` rounds that take as long in total."""
    if len(rounds) <= MAX_ROUNDS:
        return tuple(rounds)
    size = -(-len(rounds) // MAX_ROUNDS)
    groups = [rounds[i : i + size] for i in range(0, len(rounds), size)]
    return tuple(Round(*map(sum, zip(*group, strict=True))) for group in groups)


class InFlight:
    """A collective in progress.

    Attributes
    ----------
    left : list of Round
        Rounds that have not begun, the next one last.
    passed, arrival : float
        When the link has transferred the messages of the current round, and when they arrive, in s.
    work : float
        Work after their arrival, in s.
    done : bool
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self.left = list(reversed(rounds))
        self.passed = self.arrival = 0.0
        self.work = 0.0
        self.done = not rounds


class Channel:
    """The messages of a rank, with the time for which its links are busy.

    Attributes
    ----------
    free : float
        When the links have transferred all messages that have started, in s.
    busy : float
        Sum of the transfers so far, in s.
    """

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0
        self._active: list[InFlight] = []

    def start(self, rounds: Sequence[Round], now: float) -> InFlight:
        """Start an operation."""
        operation = InFlight(merged(rounds))
        if not operation.done:
            self._active.append(operation)
            self._begin(operation, now)
        return operation

    def _begin(self, operation: InFlight, now: float) -> None:
        one = operation.left.pop()
        for other in self._active:  # the link is shared equally for as long as both transfer
            if other is not operation and other.passed > now:
                delay = min(one.transfer, other.passed - now)
                other.passed, other.arrival = other.passed + delay, other.arrival + delay
        operation.passed = now + one.transfer + min(one.transfer, max(self.free - now, 0.0))
        self.free = max(self.free, now) + one.transfer
        self.busy += one.transfer
        operation.arrival = operation.passed + one.latency
        operation.work = one.work

    def _advance(self, operation: InFlight, now: float) -> float:
        """Complete a round whose messages have arrived, and begin the next; return the time."""
        now += operation.work
        if operation.left:
            self._begin(operation, now)
        else:
            operation.done = True
            self._active.remove(operation)
        return now

    def poll(self, now: float) -> float:
        """Advance all operations by the rounds that have arrived; return the time afterwards."""
        for operation in list(self._active):
            if operation.arrival <= now:
                now = self._advance(operation, now)
        return now

    def wait(self, operation: InFlight, now: float) -> float:
        """Advance all operations until one is complete; return the time when it is."""
        while not operation.done:
            first = min(self._active, key=lambda one: one.arrival)
            now = self._advance(first, max(now, first.arrival))
        return now

    def finish(self, now: float) -> float:
        """Advance all operations until they are complete; return the time when they are."""
        while self._active:
            now = self.wait(self._active[0], now)
        return now

    def pending(self, now: float) -> tuple[float, float]:
        """Return the time of transfers and of work that are still to come, in s."""
        left = [one for operation in self._active for one in operation.left]
        transfers = max(self.free - now, 0.0) + sum(one.transfer for one in left)
        own = sum(operation.work for operation in self._active)
        return transfers, own + sum(one.work for one in left)

    def skip(self, time: float, busy: float, transfers: float, work: float, now: float) -> None:
        """Let time pass in which as much starts as is completed, and more if so much is added."""
        self.free, self.busy = self.free + time, self.busy + busy
        for operation in self._active:
            operation.passed, operation.arrival = operation.passed + time, operation.arrival + time
        if max(transfers, work) > 0:
            self.start((Round(0.0, max(transfers, 0.0), max(work, 0.0)),), now)

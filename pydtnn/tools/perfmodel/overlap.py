"""Messages that are in progress while a rank computes.

MPI and the executor of schedules make progress only while they are called: the next round of a
collective begins at the next call after the messages of the last one have arrived. All ranks are
assumed to be alike, so that one rank, its processor and its share of the links are followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple


class Round(NamedTuple):
    """A round of a collective.

    Attributes
    ----------
    latency : float
        Time of an empty message, in s.
    transfer : float
        Time for which the link is busy, in s.
    work : float
        Time of the processor after the arrival: additions, in s.
    spare : float
        Part of `transfer` for which the links that others share are free, in s.
    copied, piece : float
        Time in which a processor copies what it sends and receives, and that of the last pieces,
        which it does not copy while it waits for their arrival, in s.
    calls, later : float
        Time of the processor to post the messages, and that for further pieces of the array, in
        which the first ones are in transit, in s.
    """

    latency: float
    transfer: float
    work: float
    spare: float = 0.0
    copied: float = 0.0
    piece: float = 0.0
    calls: float = 0.0
    later: float = 0.0

    def processing(self, waited: float) -> float:
        """Return the time of the processor after the arrival, which it has waited for, in s."""
        return self.work + self.copied - min(waited, self.copied - self.piece)

    @property
    def seconds(self) -> float:
        """Time of the round alone, in s."""
        travels = max(self.latency + self.transfer - self.later, 0.0)
        return self.calls + travels + self.processing(travels)


class InTransit:
    """Messages in transit, which share links equally with others for as long as both are.

    Attributes
    ----------
    latency : float
        Time after they have passed the links, in s.
    began, passed, arrival : float
        When they begin, when the shared links have transferred them, and when they arrive, in s.
    """

    latency = began = passed = arrival = 0.0

    def begin(
        self,
        now: float,
        latency: float,
        alone: float,
        busy: float,
        links: Sequence[list[InTransit]],
    ) -> None:
        """Begin, with links that take the time `alone`, and shared ones that are `busy` for less.

        `links` are the transfers of each of these.
        """
        others = {one for link in links for one in link if one.began <= now < one.passed} - {self}
        alone_for, before, work = [(busy, 0, self)], now, 0.0
        for n, other in enumerate(sorted(others, key=lambda one: one.passed)):
            work += (other.passed - before) / (len(others) - n)
            before = other.passed
            alone_for.append((work, n + 1, other))
        self.latency, self.began = latency, now
        passed, work = now, 0.0
        for n, (own, _, one) in enumerate(sorted(alone_for)):
            passed += (own - work) * (len(alone_for) - n)
            work, one.passed = own, passed
            one.arrival = max(one.arrival, passed + one.latency)
        self.arrival = max(now + alone, self.passed) + latency
        for link in links:
            link[:] = [one for one in link if one.passed > now and one is not self] + [self]


class InFlight(InTransit):
    """A collective in progress.

    Attributes
    ----------
    left : list of Round
        Rounds that have not begun, the next one last.
    round : Round
        The current one.
    posted : float
        When the calls for its messages end, in s.
    done : bool
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self.left = list(reversed(rounds))
        self.round, self.posted = Round(0.0, 0.0, 0.0), 0.0
        self.done = not rounds


class Channel:
    """The messages of a rank, with the time for which its links are busy.

    Parameters
    ----------
    links : sequence of list of InTransit
        The transfers of links that other ranks use, too; by default it has a link of its own.

    Attributes
    ----------
    free : float
        When the links have transferred all messages that have started, in s.
    busy : float
        Sum of the transfers so far, in s.
    """

    def __init__(self, links: Sequence[list[InTransit]] = ()) -> None:
        self.free = 0.0
        self.busy = 0.0
        self._active: list[InFlight] = []
        self._links = links or ([],)

    def start(self, rounds: Sequence[Round], now: float) -> InFlight:
        """Start an operation."""
        operation = InFlight(rounds)
        operation.posted = now
        if not operation.done:
            self._active.append(operation)
            self._begin(operation, now)
        return operation

    def _begin(self, operation: InFlight, now: float) -> float:
        """Post the messages of the next round; return the time afterwards."""
        one = operation.left.pop()
        operation.posted = now = now + one.calls
        busy = one.transfer - one.spare
        operation.begin(now - one.later, one.latency, one.transfer, busy, self._links)
        self.free = max(self.free, now) + busy
        self.busy += one.transfer
        operation.round = one
        return now

    def _advance(self, operation: InFlight, now: float, waited: float = 0.0) -> float:
        """Complete a round whose messages have arrived, and begin the next; return the time."""
        now += operation.round.processing(waited)
        if operation.left:
            return self._begin(operation, now)
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
            now = self._await(min(self._active, key=lambda one: one.arrival), now)
        return now

    def _await(self, operation: InFlight, now: float) -> float:
        waited = max(operation.arrival - now, 0.0)
        return self._advance(operation, now + waited, waited)

    @property
    def arrival(self) -> float:
        """When the messages of the oldest operation arrive, in s; infinite if there is none."""
        return self._active[0].arrival if self._active else inf

    def proceed(self, now: float) -> float:
        """Wait for messages of the oldest operation, as for sums of one group; return the time."""
        return self.poll(self._await(self._active[0], now))

    def finish(self, now: float) -> float:
        """Advance all operations until they are complete; return the time when they are."""
        while self._active:
            now = self.proceed(now)
        return now

    def pending(self, now: float) -> tuple[float, float]:
        """Return the time of transfers and of work that are still to come, in s."""
        left = [one for operation in self._active for one in operation.left]
        transfers = max(self.free - now, 0.0) + sum(one.transfer for one in left)
        own = [*left, *(operation.round for operation in self._active)]
        return transfers, sum(one.calls + one.processing(0.0) for one in own)

    def skip(self, time: float, busy: float, transfers: float, work: float, now: float) -> None:
        """Let time pass in which as much starts as is completed, and more if so much is added."""
        self.free, self.busy = self.free + time, self.busy + busy
        for operation in self._active:
            operation.passed, operation.arrival = operation.passed + time, operation.arrival + time
        if max(transfers, work) > 0:
            self.start((Round(0.0, max(transfers, 0.0), max(work, 0.0)),), now)

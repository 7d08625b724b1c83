"""Virtual time of ranks that are threads: a conservative discrete-event simulation.

Every rank has a clock of its own, which its thread advances while it computes. What a rank asks of
others is an event at the time of its clock. Events are executed in the order of their times when
all ranks are blocked, so no rank can add an earlier one, and times and results do not depend on
the order in which the system runs the threads. Events at the same time are executed in the order
of the ranks.

References
----------
Fujimoto, Parallel discrete event simulation, Communications of the ACM 33(10), 1990, section 4.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from pydtnn.comm.thread import Ended, name_rank
from pydtnn.tools.perfmodel.engine.cores import SECOND, SharedCores
from pydtnn.tools.perfmodel.engine.flows import Flows
from pydtnn.tools.perfmodel.network import Network, Pair
from pydtnn.utils.errors import describe

FREE_TESTS = 64
"""Tests at the same time of a rank after which they are taken to be a loop that waits."""

POLL = 5e-6
"""Time of a test in such a loop, in s."""

MAX_COMPLETIONS = 64
"""Completions that are noted before those of the past are forgotten."""


class Completion:
    """The end of something that ranks wait for.

    Attributes
    ----------
    at : float
        Its time in s; infinite until it is known.
    problem : str
        Why the operation has failed, if it has.
    owner : int
        The rank whose operation it is.
    source : int
        The rank, in its group, whose message has been received; -1 before, and without a message.
    """

    __slots__ = ("at", "owner", "problem", "source", "waits")

    def __init__(self, owner: int) -> None:
        self.at = inf
        self.problem = ""
        self.owner, self.source = owner, -1
        self.waits = False


class EngineEvent(NamedTuple):
    """An action at a time; `number` orders those of a rank at the same time."""

    time: float
    rank: int
    number: int
    action: Callable[[], None]


class RankState:
    """Clock of one rank, and what it waits for or has yet to notice."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.posted = 0
        self.clock = 0.0
        self.blocked = False
        self.pausing = False
        self.doing: Callable[[], str] = str
        self.polls, self.polled_at = 0, -1.0
        self.fresh = False  # whether an operation has been completed since the last pause
        self.later: list[float] = []  # completions that may be after the clock
        self.attended: deque[tuple[float, float]] = deque()  # calls that may not be past
        self.attends = False  # blocked in a call of the communicator
        self.deferred: list[Callable[[], None]] = []  # until its next call

    def poll(self) -> None:
        """Count a test without success; advance the clock in a loop of tests."""
        self.polls = self.polls + 1 if self.clock == self.polled_at else 1
        if self.polls > FREE_TESTS:
            self.clock += POLL
        self.polled_at = self.clock

    def sort(self) -> None:
        """Recognise the completions that are not after the clock."""
        later = [at for at in self.later if at > self.clock]
        self.fresh = self.fresh or len(later) < len(self.later)
        self.later = later


INTERNAL = -1
"""Takes the place of a rank in events of the engine itself, which precede those of ranks."""

MIN_SHARED_S = 2e-6
"""Time in s below which ranks do not share cores: a segment without kernels."""


class Engine:
    """Clocks of all ranks, and the events between them.

    Parameters
    ----------
    network : Network
        With the host of every rank.
    cores : SharedCores, optional
        By default each rank has cores of its own.
    alike : int, optional
        Ranks after which those that do the same follow: the first two of each kind are executed.
        By default all are.

    Attributes
    ----------
    executed : int
        Number of the ranks that are executed, which are the first ones.
    now : float
        Time of the event that is executed, in s.
    shared : bool
        Whether ranks share cores, which they leave to others while they wait.
    failure : BaseException or None
        The first error of the run.
    """

    def __init__(
        self, network: Network, cores: SharedCores | None = None, alike: int | None = None
    ) -> None:
        self.network = network if alike is None else network.repeated(alike)
        self.alike, self.executed = alike, 2 * alike if alike else len(network.hosts)
        self.now = 0.0
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._ranks = [RankState() for _ in range(self.executed)]
        self._running = len(self._ranks)
        self._ended = 0
        self._events: list[EngineEvent] = []
        self._number = 0
        self._flows = Flows(network)
        self._computing = Flows(cores.network if cores else Network((), {}, {}))
        self._cores, self.shared = cores, cores is not None and not cores.kept
        self._ends: dict[int, Callable[[], None]] = {}  # of what flows

    # -- called by the threads of ranks -----------------------------------------------------------

    def clock(self, rank: int) -> float:
        """Return the time of a rank, in s."""
        return self._ranks[rank].clock

    def spend(self, rank: int, seconds: float) -> None:
        """Advance the clock of a rank that computes."""
        one, cores = self._ranks[rank], self._cores
        if cores and cores.kept:
            one.clock = cores.end(rank, one.clock, seconds)
            return
        if not cores or seconds < MIN_SHARED_S:
            one.clock += seconds
            return

        def ended() -> None:
            self._wake(one, self.now)

        with self._lock:
            self._check()
            self._post(rank, lambda: self._compute(rank, seconds, ended))
            self._block(one, lambda: "compute", attends=False)
        self._sleep(one)

    def sleep(self, rank: int, seconds: float) -> None:
        """Advance the clock of a rank that does not compute."""
        self._ranks[rank].clock += seconds

    def post(self, rank: int, action: Callable[[], None]) -> None:
        """Let an action be executed at the present time of a rank, which goes on."""
        with self._lock:
            self._attend(self._ranks[rank])
            self._post(rank, action)

    def wait(self, rank: int, what: Completion, doing: Callable[[], str]) -> None:
        """Advance the clock of a rank to a completion; `doing()` describes it in a deadlock.

        Raises
        ------
        Ended
            If the run ends first.
        """
        one = self._ranks[rank]
        with self._lock:
            self._check()
            self._attend(one, what.at)
            if what.at < inf:
                one.clock = max(one.clock, what.at)
                return
            what.waits = True
            self._block(one, doing)
        self._sleep(one)

    def test(self, rank: int, what: Completion) -> bool:
        """Return whether something is complete at the present time of a rank.

        Tests take no time, except in a loop that does nothing else, which would never end.
        """
        one = self._ranks[rank]
        if what.at <= one.clock:
            return True
        one.poll()
        with self._lock:
            self._check()
            self._attend(one)
            if what.at < inf:
                return what.at <= one.clock
            self._post(rank, lambda: self._wake(one, one.clock))
            self._block(one, str)
        self._sleep(one)
        return what.at <= one.clock

    def pause(self, rank: int) -> None:
        """Advance the clock of a rank that polls to the next completion of one of its operations.

        Return at once if one has been completed since the last call.
        """
        one = self._ranks[rank]
        with self._lock:
            self._check()
            one.sort()
            if one.fresh:
                one.fresh = False
                return
            if one.later:
                first = min(one.later)
                self._attend(one, first)
                one.later.remove(first)
                one.clock = first
                return
            self._attend(one)
            one.pausing = True
            self._block(one, lambda: "a loop that tests its requests")
        self._sleep(one)

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Record that a rank has ended, and its error if it has failed."""
        with self._lock:
            self._running -= 1
            self._ended += 1
            if error is not None and not isinstance(error, Ended):
                self.fail(name_rank(rank, error))
            self._advance()

    def end(self, error: BaseException) -> None:
        """Wake all ranks; the run ends with an error, unless there was an earlier one."""
        with self._lock:
            self.fail(error)

    # -- called by actions, while all ranks are blocked -------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let an action be executed at a time that is not before the present one."""
        self._number += 1
        heapq.heappush(self._events, EngineEvent(time, INTERNAL, self._number, action))

    def transfer(
        self, pair: Pair, nbytes: float, arrived: Callable[[], None], *, follows: bool = False
    ) -> None:
        """Send bytes from a host to another; call `arrived` when they have passed.

        Those that follow others of the same message have no latency of their own.
        """
        latency = 0.0 if follows else self.network.routes[pair].latency
        self.at(self.now + latency, lambda: self._start(self._flows, pair, nbytes, arrived))

    def work(self, rank: int, seconds: float, waiting: float = 1.0) -> None:
        """Let the system work for a rank on cores that are shared, beside all computation.

        It takes `waiting` times as long for a rank that is blocked in a call of the communicator.
        """
        seconds *= waiting if self._ranks[rank].attends else 1.0
        if self.shared and seconds >= MIN_SHARED_S:
            self._compute(rank, seconds, lambda: None)

    def complete(self, what: Completion, at: float) -> None:
        """Set the time of a completion, and wake its rank if it waits for it."""
        what.at = at
        one = self._ranks[what.owner]
        if what.waits or one.pausing:
            what.waits = False
            self._wake(one, at)
        else:
            one.later.append(at)
            if len(one.later) > MAX_COMPLETIONS:
                one.sort()

    def attend(
        self,
        rank: int,
        action: Callable[[], None],
        notice: Callable[[float], float] = lambda waited: 0.0,
    ) -> None:
        """Let an action be executed when a rank next is in a call of the communicator.

        MPI libraries continue long messages in their calls only. `notice` returns how late a rank
        that has waited for some seconds notices what has happened.
        """
        one = self._ranks[rank]
        for begin, end in one.attended:
            if end >= self.now:
                self.at(min(self._noticed(begin, notice), end), action)
                return
        if one.attends:
            self.at(self._noticed(one.clock, notice), action)
        else:
            one.deferred.append(action)

    def fail(self, error: BaseException) -> None:
        """End the run with an error; the caller holds the lock."""
        if self.failure is None:
            self.failure = error
        for one in self._ranks:
            self._wake(one, one.clock)

    # -- private ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.failure is not None:
            raise Ended(describe(self.failure))

    def _post(self, rank: int, action: Callable[[], None]) -> None:
        one = self._ranks[rank]
        one.posted += 1
        heapq.heappush(self._events, EngineEvent(one.clock, rank, one.posted, action))

    def _attend(self, one: RankState, until: float = 0.0) -> None:
        """Note that a rank makes a call of the communicator, until a time that is known."""
        while one.attended and one.attended[0][1] < self.now:
            one.attended.popleft()
        one.attended.append((one.clock, max(one.clock, until if until < inf else 0.0)))
        for action in one.deferred:
            self.at(one.clock, action)
        one.deferred.clear()

    def _noticed(self, begin: float, notice: Callable[[float], float]) -> float:
        """Return when a rank that is in a call from `begin` on notices what happens now."""
        return self.now + notice(self.now - begin) if begin < self.now else begin

    def _start(self, flows: Flows, pair: Pair, length: float, ended: Callable[[], None]) -> None:
        self._number += 1
        self._ends[self._number] = ended
        flows.start(self.now, pair, length, self._number)

    def _compute(self, rank: int, seconds: float, ended: Callable[[], None]) -> None:
        """Start what takes so many seconds on a core that the rank has for itself."""
        assert self._cores is not None
        group = self._cores.groups[rank]
        self._start(self._computing, (group, group), SECOND * seconds, ended)

    def _block(self, one: RankState, doing: Callable[[], str], attends: bool = True) -> None:
        one.doing, one.blocked, one.attends = doing, True, attends
        self._running -= 1
        self._advance()

    def _sleep(self, one: RankState) -> None:
        one.gate.acquire()
        self._check()

    def _wake(self, one: RankState, time: float) -> None:
        if one.blocked:
            one.blocked = one.pausing = one.attends = False
            one.clock = max(one.clock, time)
            self._running += 1
            one.gate.release()

    def _advance(self) -> None:
        """Execute events until a rank runs again."""
        while not self._running and self._ended < len(self._ranks) and self.failure is None:
            first = self._events[0].time if self._events else inf
            time = min(first, self._flows.next_end(), self._computing.next_end())
            if time == inf:
                self._find_deadlock()
                return
            self.now = time
            try:
                self._execute(time)
            except Exception as error:  # of an action, such as one that has no memory
                self.fail(error)

    def _execute(self, time: float) -> None:
        for number in (*self._computing.end(time), *self._flows.end(time)):
            self._ends.pop(number)()
        while self._events and self._events[0].time <= time:
            heapq.heappop(self._events).action()

    def _find_deadlock(self) -> None:
        waiting = "; ".join(
            f"rank {rank} in {one.doing()}" for rank, one in enumerate(self._ranks) if one.blocked
        )
        text = f"all ranks that still run wait for each other at virtual time {self.now:.6g} s: "
        self.fail(RuntimeError(text + waiting))

"""Ranks as threads of one process: the communicator for tests and notebooks.

It is strict rather than fast. Reductions run in the order of the ranks, so results are bitwise
reproducible. A send blocks until its receive, as MPI permits, so a program that deadlocks on a
cluster without buffers deadlocks here, too. If all ranks wait for each other, or call different
collectives, the run ends with a message that lists the pending calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from pydtnn.comm.checks import wrong_length
from pydtnn.comm.communicator import be_rank
from pydtnn.comm.meeting import Call, Meeting, MeetingCommunicator
from pydtnn.comm.traffic import Traffic
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, RankError, RankFailure, describe
from pydtnn.utils.observer import Kind
from pydtnn.utils.request import Request

Side = TypeVar("Side")

Key = tuple[int | None, int, int]
"""Source, destination and tag."""


@dataclass(slots=True)
class ThreadMessage:
    """One side of a message: the array to send, or the array to receive into.

    Attributes
    ----------
    array : ndarray (n,)
        Source or destination of the values.
    source : int or None
        The rank that sends; of a receive from any rank None until a send has matched it.
    done : bool
        Whether the message has been copied, or rejected.
    problem : str
        Why the receiver rejects the message; empty if the lengths match.
    met : Message or None
        The other side, if it was posted before.
    waiting : list
        Reserved for the owner of the mailbox: the threads that wait for this side.
    """

    array: np.ndarray
    source: int | None
    done: bool = False
    problem: str = ""
    met: ThreadMessage | None = None
    waiting: list[Any] = field(default_factory=list)


class Matching(Generic[Side]):
    """Matches sends and receives, first in, first out, as MPI does.

    A receive takes the first message for its rank and with its tag from its source, or from any
    rank if that is None; a message is taken by the first receive that accepts it. It is not
    thread-safe: callers that share it hold a lock.
    """

    def __init__(self) -> None:
        # Sides that are not matched yet, with their turn, by source, destination and tag; empty
        # queues are removed.
        self._sends: dict[Key, deque[tuple[int, Side]]] = {}
        self._receives: dict[Key, deque[tuple[int, Side]]] = {}
        self._turns = 0

    def send(self, source: int, to: int, tag: int, side: Side) -> Side | None:
        """Return the receive that a message matches; otherwise keep the message."""
        key = source, to, tag
        found = [k for k in (key, (None, to, tag)) if k in self._receives]
        return self._match(self._receives, found, self._sends, key, side)

    def receive(self, source: int | None, to: int, tag: int, side: Side) -> Side | None:
        """Return the message that a receive matches; otherwise keep the receive."""
        key = source, to, tag
        found = [key] if key in self._sends else []
        if source is None:
            found = [k for k in self._sends if k[1:] == (to, tag)]
        return self._match(self._sends, found, self._receives, key, side)

    def _match(
        self,
        others: dict[Key, deque[tuple[int, Side]]],
        found: Sequence[Key],
        own: dict[Key, deque[tuple[int, Side]]],
        key: Key,
        side: Side,
    ) -> Side | None:
        """Remove and return the first side in the queues that were found, or keep this side."""
        if not found:
            self._turns += 1
            own.setdefault(key, deque()).append((self._turns, side))
            return None
        first = min(found, key=lambda key: others[key][0][0])
        _, other = others[first].popleft()
        if not others[first]:
            del others[first]
        return other


class Mailbox:
    """Messages between ranks that share memory.

    A message is copied once, directly from the sender's array into the receiver's, as soon as both
    sides are posted.
    """

    def __init__(self) -> None:
        self._matching: Matching[ThreadMessage] = Matching()

    def send(self, source: int, to: int, tag: int, array: np.ndarray) -> ThreadMessage:
        """Post an array to send; `done` once a receive has matched it."""
        message = ThreadMessage(array, source)
        message.met = self._matching.send(source, to, tag, message)
        if message.met is not None:
            _deliver(message, message.met)
        return message

    def receive(self, source: int | None, to: int, tag: int, array: np.ndarray) -> ThreadMessage:
        """Post an array to receive into; `done` once a send has matched it."""
        message = ThreadMessage(array, source)
        message.met = self._matching.receive(source, to, tag, message)
        if message.met is not None:
            _deliver(message.met, message)
        return message


def name_source(source: int | None) -> str:
    """Return from whom a receive is, for an error."""
    return "any rank" if source is None else f"rank {source}"


def _deliver(send: ThreadMessage, receive: ThreadMessage) -> None:
    if send.array.nbytes == receive.array.nbytes:
        receive.array.view(np.uint8)[:] = send.array.view(np.uint8)
    else:
        receive.problem = wrong_length(receive.array.nbytes, send.array.nbytes)
    receive.source = send.source
    send.done = receive.done = True


class Ended(RuntimeError):
    """Raised in waiting ranks when another rank has failed."""


class Killed(BaseException):
    """Raised by a rank that fails, in tests: the others receive `RankFailure`, as of MPI."""


Awaited = ThreadMessage | Meeting
"""What ranks wait for: it is `done`, and has a list of the threads that are `waiting`."""


class _Waiting:
    """A waiting thread, which is woken only when the object that it waits for is complete."""

    def __init__(self, rank: int, doing: Callable[[], str]) -> None:
        self.rank = rank
        self.doing = doing
        self.gate = threading.Lock()
        self.gate.acquire()


class World:
    """The ranks of `run_threads`: wakes them when one fails, and reports the ranks in a deadlock.

    An awaited object is completed while holding `lock`, and announced by `wake`. A message wakes
    only the ranks that wait for it, so its cost does not depend on the number of ranks.

    Parameters
    ----------
    size : int
        Number of ranks.
    first : int
        Number of the first one in errors.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first, self.lock = size, first, threading.Lock()
        self.failure: BaseException | None = None
        self._running: dict[int, int] = {}  # thread -> rank
        self._expected = size
        self._waiting: set[_Waiting] = set()
        self._has_helpers = False
        self.lost = 0
        self._remaining = {*range(size)}
        self._formed = threading.Condition(self.lock)
        self._arrived: dict[int, tuple[tuple[int, ...], int] | None] = {}

    def enter(self, rank: int) -> None:
        """Record that the calling thread is rank `rank`."""
        with self.lock:
            self._running[threading.get_ident()] = rank

    def leave(self, error: BaseException | None = None) -> None:
        """Record that the rank of the calling thread has ended, and its error if it failed."""
        with self.lock:
            rank = self._running.pop(threading.get_ident())
            self._expected -= 1
            self._remaining.discard(rank)
            if error is not None and not isinstance(error, Ended):
                self._fail(name_rank(self.first + rank, error))
            self._find_deadlock()

    def lose(self, rank: int) -> None:
        """Record that a rank has failed: waits in the groups that exist raise `RankFailure`."""
        with self.lock:
            self._running.pop(threading.get_ident())
            self._expected -= 1
            self._remaining.discard(rank)
            self.lost += 1
            self._wake_all()
            self._form()

    def remaining(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Wait for all ranks that remain; return their numbers, and how many have failed."""
        with self.lock:
            self._arrived[rank] = None
            self._form()
            while (found := self._arrived[rank]) is None:
                self._formed.wait()
                self.passed(self._arrived[rank] is not None)
            del self._arrived[rank]
            return found

    def _form(self) -> None:
        if self._arrived.keys() >= self._remaining and not any(self._arrived.values()):
            found = tuple(sorted(self._remaining)), self.lost
            self._arrived = dict.fromkeys(self._remaining, found)
            self._formed.notify_all()

    def end(self, error: BaseException) -> None:
        """Wake all waiting ranks; the run ends with `error`, unless there was an earlier one."""
        with self.lock:
            self._fail(error)

    def wake(self, what: Awaited) -> None:
        """Wake the ranks that wait for a completed object; the caller holds `lock`."""
        for one in what.waiting:
            if one in self._waiting:  # otherwise the run has ended and woken it already
                self._waiting.remove(one)
                one.gate.release()

    def wait_for(self, what: Awaited, rank: int, doing: Callable[[], str], lost: int = 0) -> None:
        """Wait until an object is complete; `doing()` describes the wait in a deadlock error.

        Parameters
        ----------
        what : Awaited
        rank : int
        doing : callable
        lost : int
            See `passed`.

        Raises
        ------
        Ended
            If the run ends first.
        RankFailure
            If a rank of the group has failed.
        """
        with self.lock:
            if self.passed(what.done, lost):
                return
            # A rank may also communicate from another thread; its waits are not tracked.
            self._has_helpers |= threading.get_ident() not in self._running
            one = _Waiting(rank, doing)
            what.waiting.append(one)
            self._waiting.add(one)
            self._find_deadlock()
        one.gate.acquire()
        self.passed(what.done, lost)

    def passed(self, ready: bool, lost: int | None = None) -> bool:
        """Return `ready`, for callers that poll instead of waiting; raise if the run has ended.

        Parameters
        ----------
        ready : bool
        lost : int, optional
            Ranks that had failed when the group was made: if there are more, it is not complete.
        """
        if not ready and self.failure is not None:
            raise Ended(describe(self.failure))
        if not ready and lost not in (None, self.lost):
            raise RankFailure
        return ready

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._wake_all()
        self._formed.notify_all()

    def _wake_all(self) -> None:
        for one in self._waiting:
            one.gate.release()
        self._waiting.clear()

    def _find_deadlock(self) -> None:
        """End the run if all running ranks wait for objects that none of them can complete."""
        if not self._waiting or self._has_helpers or len(self._waiting) < self._expected:
            return
        waiting = sorted(self._waiting, key=lambda one: one.rank)
        what = "; ".join(f"rank {one.rank} in {one.doing()}" for one in waiting)
        self._fail(RuntimeError(f"all ranks that still run wait for each other: {what}"))


def name_rank(rank: int, error: BaseException) -> BaseException:
    """Prefix an error with its rank; unchanged if it concerns all ranks or more than this run."""
    if isinstance(error, AgreedError) or not isinstance(error, Exception):
        return error
    named = RankError(rank, describe(error))
    named.__cause__ = error
    return named


def start_ranks(n: int, run: Callable[[int], None], end: Callable[[BaseException], None]) -> None:
    """Call `run(rank)` in a thread for each of `n` ranks, and wait for all of them.

    Parameters
    ----------
    n : int
    run : callable
        Raises nothing.
    end : callable
        Called with an exception of the calling thread, such as KeyboardInterrupt; ends all ranks.
    """
    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:
        end(interrupt)
        raise


def run_threads(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: Sequence[Hashable] | None = None,
    first: int = 0,
) -> list[Any]:
    """Call `function(comm, *args)` on `n` ranks that are threads, and return their results.

    The ranks share all objects except their communicator, including `args`. Within `function`,
    ``create_communicator()`` returns the rank's communicator, which a `Trainer` without `exchange`
    therefore uses.

    Parameters
    ----------
    n : int
        Number of ranks, at least 1.
    function : callable
        Function that every rank runs.
    *args
        Arguments of `function` on every rank.
    hosts : sequence of hashable, optional
        Simulated host of each rank. Default: one host.
    first : int
        The number of the first of these ranks among all, if other processes have further ones.

    Returns
    -------
    list
        The result of each rank, in their order.

    Raises
    ------
    RankError
        If a rank raises: the first error, with its rank; the other ranks are terminated.
        An `AgreedError` is raised unchanged.
    RuntimeError
        If all ranks wait for each other.

    Examples
    --------
    >>> run_threads(3, lambda comm: sum(comm.gather_object(comm.rank)))
    [3, 3, 3]
    """
    if n < 1:
        raise ValueError(f"run_threads: expected at least 1 rank, got {n}.")
    hosts = [0] * n if hosts is None else list(hosts)
    if len(hosts) != n:
        raise ValueError(f"run_threads: expected a host for each of {n} ranks, got {len(hosts)}.")
    world = World(n, first)
    group = _Group(world, hosts, "all", range(first, first + n))
    results: list[Any] = [None] * n

    def run(rank: int) -> None:
        world.enter(rank)
        comm = ThreadCommunicator(group, rank)
        be_rank(comm)
        try:
            results[rank] = function(comm, *args)
        except Killed:
            world.lose(rank)
        except BaseException as error:  # whatever it is, the other ranks must not wait for it
            world.leave(error)
        else:
            world.leave()

    start_ranks(n, run, world.end)
    if world.failure is not None:
        raise world.failure
    return results


@dataclass(eq=False)
class _Group:
    """State shared by the communicators of one group."""

    world: World
    hosts: Sequence[Hashable]
    name: str
    members: Sequence[int]
    lost: int = 0
    meetings: dict[int, Meeting] = field(default_factory=dict)
    mailbox: Mailbox = field(default_factory=Mailbox)
    _next: dict[int, _Group] = field(default_factory=dict)  # by the number of lost ranks

    def succeeded(self, hosts: Sequence[Hashable], members: Sequence[int], lost: int) -> _Group:
        """Return the group that takes the place of this one after a failure: one for all ranks."""
        name = f"{len(members)} of {self.world.size}"  # its calls are counted anew
        group = _Group(self.world, hosts, name, members, lost)
        with self.world.lock:
            return self._next.setdefault(lost, group)


class ThreadCommunicator(MeetingCommunicator):
    """One rank of a group of threads; created by `run_threads` and `split`."""

    def __init__(self, group: _Group, rank: int, traffic: Traffic | None = None) -> None:
        super().__init__(group, rank, traffic)
        self._world, self.launched = group.world, group.world.size

    def abort(self, code: int) -> NoReturn:
        self._world.end(RankError(self.rank, f"aborted with status {code}"))
        raise Ended(f"rank {self.rank}: aborted with status {code}")

    def why_not_survived(self) -> str:
        return ""

    def lost_ranks(self) -> bool:
        return self._world.lost > self._group.lost

    def shrink(self) -> ThreadCommunicator:
        own = self.members[self.rank]
        remaining, lost = self._world.remaining(own)
        hosts = [self.hosts[self.members.index(rank)] for rank in remaining]
        group = self._group.succeeded(hosts, remaining, lost)
        return ThreadCommunicator(group, remaining.index(own), self.traffic)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = clock.now_ns()
        with self._world.lock:
            message = self._group.mailbox.send(self.rank, to, tag, array)
            if message.met is not None:
                self._world.wake(message.met)
        sent = _Transfer(self, lambda: f"send to rank {to} (tag {tag})", message)
        return self._report_message(sent, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        start = clock.now_ns()
        with self._world.lock:
            message = self._group.mailbox.receive(source, self.rank, tag, array)
            if message.met is not None:
                self._world.wake(message.met)
        received = _Transfer(self, lambda: f"recv from {name_source(source)} (tag {tag})", message)
        return self._report_message(received, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _create_group(self, name: str, members: list[int]) -> _Group:
        hosts = [self.hosts[self.members.index(rank)] for rank in members]
        return _Group(self._world, hosts, name, members, self._group.lost)

    def _create_member(self, group: _Group, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(group, rank, self.traffic)

    def _join(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Meeting:
        """Bring `value` to this rank's next meeting."""
        with self._world.lock:
            turn, self._turn = self._turn, self._turn + 1
            meeting = self._group.meetings.setdefault(turn, Meeting(self.size))
            if meeting.join(self.rank, call, value, combine):
                del self._group.meetings[turn]  # every rank holds it by now
                self._world.wake(meeting)
        return meeting

    def _finish(self, call: Call, meeting: Meeting) -> Any:
        self._world.wait_for(
            meeting,
            self.rank,
            lambda: f"{call.text} (without rank {meeting.missing()})",
            self._group.lost,
        )
        if meeting.problem:
            raise ValueError(meeting.problem)
        return meeting.result

    def _ended(self, meeting: Meeting) -> bool:
        return self._world.passed(meeting.done, self._group.lost)


@dataclass(eq=False)
class _Transfer(Request):
    """A pending message."""

    comm: ThreadCommunicator
    doing: Callable[[], str]
    message: ThreadMessage

    @property
    def source(self) -> int:
        return -1 if self.message.source is None else self.message.source

    def wait(self) -> None:
        comm = self.comm
        comm._world.wait_for(self.message, comm.rank, self.doing, comm._group.lost)
        self.test()

    def test(self) -> bool:
        if self.message.problem:
            raise ValueError(self.message.problem)
        return self.comm._world.passed(self.message.done, self.comm._group.lost)

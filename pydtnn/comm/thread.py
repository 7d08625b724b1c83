"""Ranks as threads of one process: the communicator for tests and notebooks.

It is strict rather than fast. Reductions run in the order of the ranks, so results are bitwise
reproducible. A send blocks until its receive, as MPI permits, so a program that deadlocks on a
cluster without buffers deadlocks here, too. If all ranks wait for each other, or call different
collectives, the run ends with a message that lists the pending calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.mailbox import Mailbox, Message, name_source
from pydtnn.comm.meeting import Call, Meeting, MeetingCommunicator
from pydtnn.comm.messages import Messages
from pydtnn.comm.request import Request
from pydtnn.comm.world import Ended, World
from pydtnn.utils import clock
from pydtnn.utils.errors import RankError
from pydtnn.utils.observer import Kind

_OWN: ContextVar[Communicator] = ContextVar("communicator of a rank that is a thread")
"""Set by `be_rank` in the threads of ranks, and only there; no other code sets it."""


def communicator_of_thread() -> Communicator | None:
    """Return the communicator of the calling thread, if it is a rank."""
    return _OWN.get(None)


def be_rank(comm: Communicator) -> None:
    """Make a communicator that of the calling thread, until the thread ends."""
    _OWN.set(comm)


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
    world = World(n)
    group = _Group(world, hosts, "all", range(n))
    results: list[Any] = [None] * n

    def run(rank: int) -> None:
        world.enter(rank)
        comm = ThreadCommunicator(group, rank)
        be_rank(comm)
        try:
            results[rank] = function(comm, *args)
        except BaseException as error:  # whatever it is, the other ranks must not wait for it
            world.leave(error)
        else:
            world.leave()

    start_ranks(n, run, world.end)
    if world.failure is not None:
        raise world.failure
    return results


class _Group:
    """State shared by the communicators of one group."""

    def __init__(
        self, world: World, hosts: Sequence[Hashable], name: str, members: Sequence[int]
    ) -> None:
        self.world = world
        self.hosts = hosts
        self.name, self.members = name, members
        self.meetings: dict[int, Meeting] = {}
        self.mailbox = Mailbox()


class ThreadCommunicator(MeetingCommunicator):
    """One rank of a group of threads; created by `run_threads` and `split`."""

    def __init__(self, group: _Group, rank: int, messages: Messages | None = None) -> None:
        super().__init__(group, rank, messages)
        self._world = group.world

    def abort(self, code: int) -> NoReturn:
        self._world.end(RankError(self.rank, f"aborted with status {code}"))
        raise Ended(f"rank {self.rank}: aborted with status {code}")

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = clock.now_ns()
        with self._world.lock:
            message = self._group.mailbox.send(self.rank, to, tag, array)
            if message.met is not None:
                self._world.wake(message.met)
        sent = _Transfer(self, lambda: f"send to rank {to} (tag {tag})", message)
        return self._reported(sent, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        start = clock.now_ns()
        with self._world.lock:
            message = self._group.mailbox.receive(source, self.rank, tag, array)
            if message.met is not None:
                self._world.wake(message.met)
        received = _Transfer(self, lambda: f"recv from {name_source(source)} (tag {tag})", message)
        return self._reported(received, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _create_group(self, name: str, members: list[int]) -> _Group:
        hosts = [self.hosts[self.members.index(rank)] for rank in members]
        return _Group(self._world, hosts, name, members)

    def _create_member(self, group: _Group, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(group, rank, self._messages)

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
            meeting, self.rank, lambda: f"{call.text} (without rank {meeting.missing()})"
        )
        if meeting.problem:
            raise ValueError(meeting.problem)
        return meeting.result

    def _ended(self, meeting: Meeting) -> bool:
        return self._world.passed(meeting.done)


@dataclass(eq=False)
class _Transfer(Request):
    """A pending message."""

    comm: ThreadCommunicator
    doing: Callable[[], str]
    message: Message

    @property
    def source(self) -> int:
        return -1 if self.message.source is None else self.message.source

    def wait(self) -> None:
        self.comm._world.wait_for(self.message, self.comm.rank, self.doing)
        self.test()

    def test(self) -> bool:
        if self.message.problem:
            raise ValueError(self.message.problem)
        return self.comm._world.passed(self.message.done)

"""Ranks as threads of one process: the communicator for tests and notebooks.

It is strict rather than fast. Reductions run in the order of the ranks, so results are bitwise
reproducible. A send blocks until its receive, as MPI permits, so a program that deadlocks on a
cluster without buffers deadlocks here, too. If all ranks wait for each other, or call different
collectives, the run ends with a message that lists the pending calls.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.mailbox import Mailbox, Message
from pydtnn.comm.messages import Messages
from pydtnn.comm.world import Ended, World
from pydtnn.utils.errors import RankError
from pydtnn.utils.observer import Kind, Observer

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}

_OWN: ContextVar[ThreadCommunicator] = ContextVar("communicator of a rank of run_threads")
"""Set by `run_threads` in the threads that it starts, and only there; no other code sets it."""


def communicator_of_thread() -> ThreadCommunicator | None:
    """Return the communicator of the calling thread, if it is a rank of `run_threads`."""
    return _OWN.get(None)


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
        _OWN.set(comm)  # ends with the thread, which has a context of its own
        try:
            results[rank] = function(comm, *args)
        except BaseException as error:  # whatever it is, the other ranks must not wait for it
            world.leave(error)
        else:
            world.leave()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:
        world.end(interrupt)
        raise
    if world.failure is not None:
        raise world.failure
    return results


class _Meeting:
    """One collective call: the value of each rank, and the result."""

    def __init__(self, size: int) -> None:
        self.absent = size
        self.calls: list[str | None] = [None] * size
        self.values: list[Any] = [None] * size
        self.result: Any = None
        self.done = False
        self.problem = ""
        self.waiting: list[Any] = []  # of the world

    def join(self, rank: int, call: str, value: Any, combine: Callable[[list[Any]], Any]) -> bool:
        """Add this rank's value; the last rank computes the result."""
        self.calls[rank], self.values[rank] = call, value
        self.absent -= 1
        if self.absent:
            return False
        odd = next((r for r, other in enumerate(self.calls) if other != self.calls[0]), None)
        if odd is None:
            self.result = combine(self.values)
        else:
            self.problem = (
                f"rank 0 calls {self.calls[0]} where rank {odd} calls {self.calls[odd]}; "
                "all ranks must make the same calls in the same order."
            )
        self.values = []
        self.done = True
        return True

    def missing(self) -> str:
        return ", ".join(str(rank) for rank, call in enumerate(self.calls) if call is None)


class _Group:
    """State shared by the communicators of one group."""

    def __init__(
        self, world: World, hosts: Sequence[Hashable], name: str, members: Sequence[int]
    ) -> None:
        self.world = world
        self.hosts = hosts
        self.name, self.members = name, members
        self.meetings: dict[int, _Meeting] = {}
        self.mailbox = Mailbox()


class ThreadCommunicator(Communicator):
    """One rank of a group of threads; created by `run_threads` and `split`."""

    def __init__(self, group: _Group, rank: int, messages: Messages | None = None) -> None:
        super().__init__(rank, group.hosts)
        self.members = group.members
        self._group = group
        self._messages = messages or Messages()
        self._world = group.world
        self._turn = 0  # collectives this rank has called: the n-th calls of all ranks meet

    def barrier(self) -> None:
        self._meet("barrier", None, lambda values: None)

    def gather_object(self, value: Any) -> list[Any]:
        # Through pickle, as between processes: ranks must not share what they seem to have copied.
        pickles = self._meet("gather_object", pickle.dumps(value), lambda values: values)
        return [pickle.loads(data) for data in pickles]

    def observe(self, observer: Observer | None) -> None:
        self._messages.observe(observer, self.members)

    def abort(self, code: int) -> NoReturn:
        self._world.end(RankError(self.rank, f"aborted with status {code}"))
        raise Ended(f"rank {self.rank}: aborted with status {code}")

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        def combine(arrays: list[np.ndarray]) -> np.ndarray:
            return _reduce(arrays, op)

        call = f"allreduce {op} of {_what(array)}"
        return _Reduction(self, call, self._join(call, array, combine), array)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        # A copy, because the root goes on (and may write) before the last rank has read.
        call = f"broadcast of {_what(array)} from rank {root}"
        array[:] = self._meet(call, array, lambda arrays: arrays[root].copy())

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        call = f"reduce_scatter of {_what(array)} by {counts}"
        begin = sum(counts[: self.rank])
        total = self._meet(call, array, lambda arrays: _reduce(arrays, "sum"))
        out[:] = total[begin : begin + out.size]

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        call = f"allgather of {_what(out)} by {counts}"
        out[:] = self._meet(call, array, np.concatenate)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = time.perf_counter_ns()
        with self._world.lock:
            message = self._group.mailbox.send((self.rank, to, tag), array)
            if message.met is not None:
                self._world.wake(message.met)
        sent = _Transfer(self, lambda: f"send to rank {to} (tag {tag})", message)
        return self._reported(sent, Kind.SENT, start, to, tag)

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        start = time.perf_counter_ns()
        with self._world.lock:
            message = self._group.mailbox.receive((source, self.rank, tag), array)
            if message.met is not None:
                self._world.wake(message.met)
        received = _Transfer(self, lambda: f"recv from rank {source} (tag {tag})", message)
        return self._reported(received, Kind.RECEIVED, start, source, tag)

    def _reported(self, request: _Transfer, kind: Kind, start: int, peer: int, tag: int) -> Request:
        if self._messages.observer is None:
            return request
        return self._messages.reported(
            request,
            kind,
            self._group.name,
            start=start,
            peer=self.members[peer],
            tag=tag,
            size=request.message.array.nbytes,
        )

    def _split(self, color: int, key: int) -> ThreadCommunicator:
        name = f"{self._group.name}/{self._turn}"  # equal on all ranks, whichever is the last

        def combine(wishes: list[tuple[int, int, int]]) -> dict[int, tuple[_Group, int]]:
            places = {}
            for color, chosen in groupby(sorted(wishes), key=itemgetter(0)):
                members = [rank for _, _, rank in chosen]
                group = _Group(
                    self._world,
                    [self.hosts[rank] for rank in members],
                    f"{name}.{color}",
                    [self.members[rank] for rank in members],
                )
                places.update({rank: (group, place) for place, rank in enumerate(members)})
            return places

        group, place = self._meet("split", (color, key, self.rank), combine)[self.rank]
        return ThreadCommunicator(group, place, self._messages)

    def _free(self) -> None:
        self._meet("free", None, lambda values: None)

    def _join(self, call: str, value: Any, combine: Callable[[list[Any]], Any]) -> _Meeting:
        """Bring `value` to this rank's next meeting."""
        with self._world.lock:
            turn, self._turn = self._turn, self._turn + 1
            meeting = self._group.meetings.setdefault(turn, _Meeting(self.size))
            if meeting.join(self.rank, call, value, combine):
                del self._group.meetings[turn]  # every rank holds it by now
                self._world.wake(meeting)
        return meeting

    def _meet(self, call: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring `value`, wait for all ranks, and return what `combine` made of their values."""
        return self._finish(call, self._join(call, value, combine))

    def _finish(self, call: str, meeting: _Meeting) -> Any:
        self._world.wait_for(
            meeting, self.rank, lambda: f"{call} (without rank {meeting.missing()})"
        )
        if meeting.problem:
            raise ValueError(meeting.problem)
        return meeting.result


@dataclass(eq=False)
class _Reduction(Request):
    """A pending allreduce: the result is copied to the rank's array by `wait` or `test`."""

    comm: ThreadCommunicator
    call: str
    meeting: _Meeting
    array: np.ndarray | None

    def wait(self) -> None:
        if self.array is not None:
            self.array[:] = self.comm._finish(self.call, self.meeting)
            self.array = None

    def test(self) -> bool:
        if self.array is not None and self.comm._world.passed(self.meeting.done):
            self.wait()
        return self.array is None


@dataclass(eq=False)
class _Transfer(Request):
    """A pending message."""

    comm: ThreadCommunicator
    doing: Callable[[], str]
    message: Message

    def wait(self) -> None:
        self.comm._world.wait_for(self.message, self.comm.rank, self.doing)
        self.test()

    def test(self) -> bool:
        if self.message.problem:
            raise ValueError(self.message.problem)
        return self.comm._world.passed(self.message.done)


def _reduce(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """Reduce from left to right, in the order of the ranks."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        _UFUNCS[op](total, array, out=total)
    return total


def _what(array: np.ndarray) -> str:
    return f"{array.size} {array.dtype}"

"""Shared state of ranks that are threads: a lock, the waiting ranks, and the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from pydtnn.utils.errors import AgreedError, RankError, describe


class Ended(RuntimeError):
    """Raised in waiting ranks when another rank has failed."""


class Awaited(Protocol):
    """An object that ranks wait for, such as the other side of a message.

    Attributes
    ----------
    done : bool
    waiting : list
        The threads that wait for it.
    """

    done: bool
    waiting: list[Any]


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
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._running: dict[int, int] = {}  # thread -> rank
        self._expected = size
        self._waiting: set[_Waiting] = set()
        self._has_helpers = False

    def enter(self, rank: int) -> None:
        """Record that the calling thread is rank `rank`."""
        with self.lock:
            self._running[threading.get_ident()] = rank

    def leave(self, error: BaseException | None = None) -> None:
        """Record that the rank of the calling thread has ended, and its error if it failed."""
        with self.lock:
            rank = self._running.pop(threading.get_ident())
            self._expected -= 1
            if error is not None and not isinstance(error, Ended):
                self._fail(_named(rank, error))
            self._find_deadlock()

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

    def wait_for(self, what: Awaited, rank: int, doing: Callable[[], str]) -> None:
        """Wait until an object is complete; `doing()` describes the wait in a deadlock error.

        Raises
        ------
        Ended
            If the run ends first.
        """
        with self.lock:
            if self.passed(what.done):
                return
            # A rank may also communicate from another thread; its waits are not tracked.
            self._has_helpers |= threading.get_ident() not in self._running
            one = _Waiting(rank, doing)
            what.waiting.append(one)
            self._waiting.add(one)
            self._find_deadlock()
        one.gate.acquire()
        self.passed(what.done)

    def passed(self, ready: bool) -> bool:
        """Return `ready`, for callers that poll instead of waiting; raise if the run has ended."""
        if not ready and self.failure is not None:
            raise Ended(describe(self.failure))
        return ready

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
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


def _named(rank: int, error: BaseException) -> BaseException:
    """Prefix an error with its rank; unchanged if it concerns all ranks or more than this run."""
    if isinstance(error, AgreedError) or not isinstance(error, Exception):
        return error
    named = RankError(rank, describe(error))
    named.__cause__ = error
    return named

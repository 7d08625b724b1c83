"""What ranks that are threads share: a lock, who waits for what, and the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pydtnn.errors import AgreedError, RankError, describe


class Ended(RuntimeError):
    """Raised in the ranks that another rank's error wakes."""


@dataclass
class _Waiting:
    rank: int
    doing: Callable[[], str]
    ready: Callable[[], bool]


class World:
    """The ranks of `run_threads`: wakes them when one fails, and names those that wait for ever.

    Every change of what ranks wait for is made while holding `changed`, and announced with
    `changed.notify_all()`.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self._running: dict[int, int] = {}  # thread -> rank
        self._expected = size
        self._waiting: dict[int, _Waiting] = {}  # thread -> what it waits for
        self._has_helpers = False

    def enter(self, rank: int) -> None:
        """Note that the calling thread is rank `rank`."""
        with self.changed:
            self._running[threading.get_ident()] = rank

    def leave(self, error: BaseException | None = None) -> None:
        """Note that the calling thread's rank has ended, and how."""
        with self.changed:
            rank = self._running.pop(threading.get_ident())
            self._expected -= 1
            if error is not None and not isinstance(error, Ended):
                self._fail(_named(rank, error))
            self._find_deadlock()

    def end(self, error: BaseException) -> None:
        """Wake every rank that waits; `error` is what the run ends with, unless one came before."""
        with self.changed:
            self._fail(error)

    def wait_until(self, ready: Callable[[], bool], rank: int, doing: Callable[[], str]) -> None:
        """Wait, holding `changed`, until `ready()`; `doing()` says what for, if it lasts for ever.

        Raises
        ------
        Ended
            Where the run ends before.
        """
        if ready():
            return
        thread = threading.get_ident()
        # A rank may also communicate from another thread; who waits for whom is then unknown.
        self._has_helpers |= thread not in self._running
        self._waiting[thread] = _Waiting(rank, doing, ready)
        try:
            self._find_deadlock()
            while not ready():
                if self.failure is not None:
                    raise Ended(describe(self.failure))
                self.changed.wait()
        finally:
            del self._waiting[thread]

    def passed(self, ready: bool) -> bool:
        """Return `ready`, for those that ask instead of waiting; they too must hear of an error."""
        if not ready and self.failure is not None:
            raise Ended(describe(self.failure))
        return ready

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.changed.notify_all()

    def _find_deadlock(self) -> None:
        """End the run where all ranks that still run wait, for what none of them can bring."""
        waiting = self._waiting.values()
        if (
            not waiting
            or self._has_helpers
            or len(waiting) < self._expected
            or any(one.ready() for one in waiting)
        ):
            return
        what = "; ".join(f"rank {w.rank} in {w.doing()}" for w in sorted(waiting, key=_by_rank))
        self._fail(RuntimeError(f"all ranks that still run wait for each other: {what}"))


def _by_rank(waiting: _Waiting) -> int:
    return waiting.rank


def _named(rank: int, error: BaseException) -> BaseException:
    """The error with its rank; as it is where it concerns all ranks, or ends more than this run."""
    if isinstance(error, AgreedError) or not isinstance(error, Exception):
        return error
    named = RankError(rank, describe(error))
    named.__cause__ = error
    return named

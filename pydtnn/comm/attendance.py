"""Notices that this rank waits for one that has left the program, which would be a deadlock.

A rank leaves where its program ends: at its last line, or by `sys.exit`, which calls no hook of
Python. All ranks synchronise when they leave. A rank that waits there for a while sends the others
the number of collective calls that it has made on each group. A rank that waits inside MPI, in a
call that the other has not made, or for a message of the other, reports that and ends all ranks.

It costs nothing while ranks compute: a thread looks twice a second whether the rank has been in one
call all the time, and only then whether another one has left.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

INTERVAL = 0.5
"""Seconds between two looks, and until a rank that leaves alone tells the others."""

LOOKS = 4
"""After so many looks a message of a rank that has left will not come any more."""


class Wait(NamedTuple):
    """A call that this rank is in.

    Attributes
    ----------
    group : str
        Names the group of ranks, alike on all of them.
    members : sequence of int
        Its ranks, as they are numbered among all ranks.
    what : str
        The call.
    number : int
        The collective calls on this group so far; 0 for messages.
    peer : int
        Where it is a message, the other rank in the group.
    """

    group: str
    members: Sequence[int]
    what: str
    number: int
    peer: int = -1


class Attendance:
    """What this rank has called, what it waits for, and who has left.

    Attributes
    ----------
    calls : dict of str to int
        Collective calls so far by group.
    waiting : Wait or None
        The call that the main thread is in.
    """

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.waiting: Wait | None = None
        self._left: dict[int, dict[str, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, mpi: Any, comm: Any, report: Callable[[str], None]) -> None:
        """Begin to look. Collective: all ranks call it.

        Parameters
        ----------
        mpi : module
            `mpi4py.MPI`.
        comm : mpi4py.MPI.Intracomm
            All ranks; used for nothing else.
        report : callable
            Ends all ranks, with a reason.
        """
        self._mpi, self._comm, self._report = mpi, comm, report
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Wait for the other ranks to leave, too; to be called at the end of the program."""
        if self._thread is None or self._mpi.Is_finalized():
            return
        self._stop.set()
        self._thread.join()
        for stream in (sys.stdout, sys.stderr):  # the other ranks may end this one while it waits
            with contextlib.suppress(Exception):
                stream.flush()
        everyone = self._comm.Ibarrier()
        told: list[Any] = []
        tell_at, pause = time.monotonic() + INTERVAL, 1e-4
        while not everyone.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            self._hear()
            if not told and time.monotonic() > tell_at:
                others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
                told = [self._comm.isend(dict(self.calls), rank) for rank in others]

    def _look(self) -> None:
        before, looks = None, 0
        while not self._stop.wait(INTERVAL):
            wait = self.waiting
            looks = looks + 1 if wait is not None and wait is before else 0
            before = wait
            if wait is not None and looks and not self._mpi.Is_finalized():
                self._hear()
                rank = self._absent(wait, looks)
                if rank is not None and self.waiting is wait:
                    self._report(
                        f"waits in {wait.what} for rank {rank}, whose program has ended; all ranks "
                        "must make the same calls, and leave together"
                    )

    def _hear(self) -> None:
        """Take in who has left."""
        while message := self._comm.improbe():
            status = self._mpi.Status()
            calls = message.recv(status)
            self._left[status.source] = calls

    def _absent(self, wait: Wait, looks: int) -> int | None:
        """Return a rank that has left, and without which the wait has no end."""
        for rank, calls in self._left.items():
            if wait.number:
                if rank in wait.members and calls.get(wait.group, 0) < wait.number:
                    return rank
            elif rank == wait.members[wait.peer] and looks >= LOOKS:
                return rank
        return None

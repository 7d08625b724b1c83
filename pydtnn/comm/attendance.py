"""Detection of ranks that wait for a rank that has already exited, which would be a deadlock.

A rank exits at the end of its program: after its last line, or by `sys.exit`, which calls no hook
of Python. All ranks synchronise when they exit. A rank that waits there for a while sends the
others the number of collective calls that it has made on each group. A rank that waits inside MPI,
in a call that the other rank has not made or for a message from it, reports that and terminates
all ranks.

There is no cost while ranks compute: a thread checks twice a second whether the rank has been in
the same call since the last check, and only then whether another rank has exited.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydtnn.comm.supervision import WATCHER, Supervision
from pydtnn.comm.traffic import Traffic

INTERVAL_S = 0.5
"""Seconds between two checks, and before a rank that exits alone notifies the others."""

MAX_LATE_CHECKS = 4
"""Number of checks after which no further message of a rank that has exited is expected."""


class Wait(NamedTuple):
    """A communication call that this rank is in.

    Attributes
    ----------
    group : str
        Name of the group of ranks, equal on all of them.
    members : sequence of int
        Ranks of the group, by their numbers among all ranks.
    what : str
        Description of the call.
    number : int
        Number of collective calls on this group so far; 0 for messages.
    peer : int
        For a message, the other rank, numbered within the group; -1 if it may be any.
    """

    group: str
    members: Sequence[int]
    what: str
    number: int
    peer: int = -1


class Attendance:
    """Records the calls of this rank, its current wait, and the ranks that have exited.

    Attributes
    ----------
    calls : dict of str to int
        Number of collective calls so far, by group.
    waiting : Wait or None
        The call that the main thread is currently in.
    supervision : Supervision or None
        Where the monitor process reads the calls.
    traffic : Traffic or None
        Knows the method in progress.
    """

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.waiting: Wait | None = None
        self.supervision: Supervision | None = None
        self.traffic: Traffic | None = None
        self._exited: dict[int, dict[str, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, wait: Wait) -> None:
        """Called before this rank waits in a call."""
        self.waiting = wait
        if self.supervision is not None:
            peer = wait.members[wait.peer] if wait.peer >= 0 else -1
            self.supervision.activity.call(wait.what, wait.group, wait.number, peer)

    def exit(self) -> None:
        """Called when the wait is over."""
        self.waiting = None
        if self.supervision is not None:
            self.supervision.activity.called()

    def watch(self, mpi: Any, comm: Any, report: Callable[[str], None]) -> None:
        """Start checking in a thread. Collective: all ranks call it.

        Parameters
        ----------
        mpi : module
            `mpi4py.MPI`.
        comm : mpi4py.MPI.Intracomm
            Communicator of all ranks, reserved for this object.
        report : callable
            Terminates all ranks; its argument is the reason.
        """
        self._mpi, self._comm, self._report = mpi, comm, report
        name = f"{WATCHER}-attendance"
        self._thread = threading.Thread(target=self._look, daemon=True, name=name)
        self._thread.start()
        atexit.register(self.leave)

    def close(self) -> None:
        """Stop checking, as ranks have failed: the others do so with another object."""
        atexit.unregister(self.leave)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Wait until all ranks exit; to be called at the end of the program."""
        if self._thread is None or self._mpi.Is_finalized():
            return
        self.close()
        for stream in (sys.stdout, sys.stderr):  # this rank may be terminated while it waits
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(self._mpi.Exception):  # a rank has failed: nothing to wait for
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        everyone = self._comm.Ibarrier()
        notices: list[Any] = []
        notify_at, pause = time.monotonic() + INTERVAL_S, 1e-4
        while not everyone.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            self._receive()
            if not notices and time.monotonic() > notify_at:
                others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
                notices = [self._comm.isend(dict(self.calls), rank) for rank in others]

    def _look(self) -> None:
        before, looks = None, 0
        while not self._stop.wait(INTERVAL_S):
            wait = self.waiting
            looks = looks + 1 if wait is not None and wait is before else 0
            before = wait
            if wait is not None and looks and not self._mpi.Is_finalized():
                try:
                    self._receive()
                except self._mpi.Exception:  # a rank has failed, which the main thread notices
                    return
                rank = self._absent(wait, looks)
                if rank is not None and self.waiting is wait:
                    within = "" if self.traffic is None else self.traffic.within
                    self._report(
                        f"waits in {wait.what}{within} for rank {rank}, whose program has "
                        "ended; all ranks must make the same calls, and leave together"
                    )

    def _receive(self) -> None:
        """Receive the messages of ranks that have exited."""
        while message := self._comm.improbe():
            status = self._mpi.Status()
            calls = message.recv(status)
            self._exited[status.source] = calls

    def _absent(self, wait: Wait, looks: int) -> int | None:
        """Return a rank that has exited and without which the wait cannot complete."""
        for rank, calls in self._exited.items():
            if wait.number:
                if rank in wait.members and calls.get(wait.group, 0) < wait.number:
                    return rank
            elif looks >= MAX_LATE_CHECKS and self._needs(wait, rank):
                return rank
        return None

    def _needs(self, wait: Wait, rank: int) -> bool:
        """Return whether a message can come from no other rank than one that has exited."""
        if wait.peer >= 0:
            return rank == wait.members[wait.peer]
        others = {*wait.members} - {self._comm.rank}
        return rank in others and others <= self._exited.keys()

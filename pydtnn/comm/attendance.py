"""Detection of ranks that wait for a rank that has already exited, which would be a deadlock.

A rank exits at the end of its program: after its last line, or by `sys.exit`, which calls no hook
of Python. All ranks synchronise when they exit. A rank that waits there for a while has the monitor
processes send the others the number of collective calls that it has made on each group. A rank that
waits inside MPI, in a call that the other rank has not made or for a message from it, reports that
and terminates all ranks (`pydtnn.comm.supervision`).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydtnn.comm.supervision import Supervision
from pydtnn.comm.traffic import Traffic

ALONE_S = 0.5
"""Seconds before a rank that exits alone notifies the others."""

LATE_S = 2.0
"""Seconds after which no further message of a rank that has exited is expected."""


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
        self._before: Wait | None = None
        self._seconds = 0.0

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

    def watch(self, mpi: Any, comm: Any, supervision: Supervision) -> None:
        """Have ranks wait for each other when they exit. Collective: all ranks call it.

        Parameters
        ----------
        mpi : module
            `mpi4py.MPI`.
        comm : mpi4py.MPI.Intracomm
            Communicator of all ranks, reserved for this object.
        supervision : Supervision
        """
        self._mpi, self._comm, self.supervision = mpi, comm, supervision
        supervision.exited, supervision.absent = self._exited, self._absent
        atexit.register(self.leave)

    def close(self) -> None:
        """Wait for no rank at the exit, as ranks have failed: the others do so with another one."""
        atexit.unregister(self.leave)
        if self.supervision is not None:
            self.supervision.absent = lambda passed: ""

    def leave(self) -> None:
        """Wait until all ranks exit; to be called at the end of the program."""
        if self._mpi.Is_finalized():
            return
        for stream in (sys.stdout, sys.stderr):  # this rank may be terminated while it waits
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(self._mpi.Exception):  # a rank has failed: nothing to wait for
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        assert self.supervision is not None
        everyone = self._comm.Ibarrier()
        notify_at, pause = time.monotonic() + ALONE_S, 1e-4
        while not everyone.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() > notify_at:
                self.supervision.exit(self.calls)
                notify_at = math.inf

    def _absent(self, passed: float) -> str:
        """Return why the wait cannot complete, `passed` seconds after the last call; or nothing."""
        wait = self.waiting
        self._seconds = self._seconds + passed if wait is self._before else 0.0
        self._before = wait
        if wait is None or not self._seconds:
            return ""
        for rank, calls in self._exited.items():
            if wait.number:
                absent = rank in wait.members and calls.get(wait.group, 0) < wait.number
            else:
                absent = self._seconds >= LATE_S and self._needs(wait, rank)
            if absent and self.waiting is wait:
                within = "" if self.traffic is None else self.traffic.within
                return (
                    f"waits in {wait.what}{within} for rank {rank}, whose program has ended; all "
                    "ranks must make the same calls, and leave together"
                )
        return ""

    def _needs(self, wait: Wait, rank: int) -> bool:
        """Return whether a message can come from no other rank than one that has exited."""
        if wait.peer >= 0:
            return rank == wait.members[wait.peer]
        others = {*wait.members} - {self._comm.rank}
        return rank in others and others <= self._exited.keys()

"""Detection of ranks that wait for a rank that has already exited, which would be a deadlock.

A rank exits at the end of its program: after its last line, or by `sys.exit`, which calls no hook
of Python. All ranks synchronise when they exit. A rank that waits there for a while sends the
monitor processes the number of collective calls that it has made on each of its groups. They end
the run if a rank waits inside MPI in a call that the other one has not made, or for its message.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

from pydtnn.comm.monitor.supervision import Supervision

ALONE_S = 0.5
"""Seconds before a rank that exits alone notifies the others."""


class Wait(NamedTuple):
    """A communication call that this rank is in.

    Attributes
    ----------
    group : str
        Name of the group of ranks, equal on all of them.
    what : str
        Description of the call.
    number : int
        Number of collective calls on this group so far; 0 for messages.
    peer : int
        For a message, the other rank, numbered among all ranks; -1 if it may be any.
    """

    group: str
    what: str
    number: int = 0
    peer: int = -1


class Attendance:
    """Counts the calls of this rank, and stores its current wait for the monitor process.

    Attributes
    ----------
    calls : dict of str to int
        Number of collective calls so far, by group, for all groups of this rank.
    supervision : Supervision or None
        Where the monitor process reads the calls.
    """

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.supervision: Supervision | None = None

    def enter(self, wait: Wait) -> None:
        """Called before this rank waits in a call."""
        if self.supervision is not None:
            self.supervision.activity.call(wait.what, wait.group, wait.number, wait.peer)

    def exit(self) -> None:
        """Called when the wait is over."""
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
        atexit.register(self.leave)

    def close(self) -> None:
        """Wait for no rank at the exit, as ranks have failed: the others do so with another one."""
        atexit.unregister(self.leave)

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

"""Selection of the process of a host that reports why a run ends: a failed rank or the watchdog."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from pydtnn.comm import watchdog
from pydtnn.comm.communicator import Communicator

_FILE, _SOCKET = "first", "ranks"

_PATIENCE = 2.0
"""Seconds to wait for the watchdog to start, which takes about 0.05 s."""


class Reporter:
    """Ensures that one rank of a host reports why a run ends, and that the watchdog reports a kill.

    The ranks of a host open one file; the rank that writes the first byte reports for all. A
    separate process reports a rank that terminates unexpectedly (`pydtnn.comm.watchdog`). The files
    are unlinked once all ranks have opened them, so none remains however the ranks end.

    Collective: all ranks construct one.

    Parameters
    ----------
    comm : Communicator
    """

    def __init__(self, comm: Communicator) -> None:
        folder = _make_folder() if comm.local_rank == 0 else None
        watched = comm.size > 1
        listener = _listen(folder) if folder is not None and watched else None
        folder = comm.gather_object(folder)[comm.hosts[comm.rank]]
        self._file = self._connection = None
        if folder is not None:
            self._file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND)
            self._connection = _connect(folder, comm.rank) if watched else None
        if listener is not None and self._file is not None:
            _start(listener, self._file, comm.local_size, comm.size)
        if self._connection is not None:
            _wait(self._connection)
        comm.barrier()
        if folder is not None and comm.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        comm.barrier()  # no rank terminates this one before it has removed the names
        atexit.register(self.leave)

    def is_first(self) -> bool:
        """Return whether no rank of this host has reported the end of the run yet, and claim it.

        If the file could not be created, every rank reports.
        """
        return self._file is None or watchdog.is_first(self._file)

    def leave(self) -> None:
        """Unregister this rank from the watchdog, so that its end is expected."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the process may have been killed
                self._connection.sendall(watchdog.LEAVING)
            self._connection = None


def _make_folder() -> str | None:
    """Make a folder with an empty file, or return None if no folder is writable."""
    try:
        folder = tempfile.mkdtemp(prefix="pydtnn-")
        os.close(os.open(os.path.join(folder, _FILE), os.O_CREAT, 0o600))
    except OSError:
        return None
    return folder


def _listen(folder: str) -> socket.socket | None:
    """Open a socket in the folder if the system supports all that the watchdog uses."""
    if sys.platform != "linux" or not sys.executable:
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.path.join(folder, _SOCKET))
        listener.listen(4096)  # all ranks may connect before the process accepts
    except OSError:  # the path of the folder is too long
        listener.close()
        return None
    return listener


def _connect(folder: str, rank: int) -> socket.socket | None:
    """Connect to the socket in the folder, if there is one, and send the number of the rank."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(folder, _SOCKET))
        connection.sendall(b"%d\n" % rank)
    except OSError:
        connection.close()
        return None
    return connection


def _wait(connection: socket.socket) -> None:
    """Wait until all ranks are watched: before that, the rank that ends cannot be identified."""
    connection.settimeout(_PATIENCE)
    with contextlib.suppress(OSError):
        connection.recv(len(watchdog.READY))
    connection.settimeout(None)


def _start(listener: socket.socket, file: int, ranks: int, of: int) -> None:
    """Start the process, which inherits the listener and ends after the last rank of this host."""
    files = (listener.fileno(), file)
    program = [sys.executable, "-I", "-S", watchdog.__file__, *map(str, (*files, ranks, of))]
    with listener, contextlib.suppress(OSError):
        process = subprocess.Popen(
            program,
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # not terminated by Ctrl-C in a terminal
        )
        process.returncode = 0  # it outlives this rank, which need not wait for it

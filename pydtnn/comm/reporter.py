"""Selection of the process of a host that reports why a run ends: a failed rank or the watchdog."""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict

from pydtnn.comm import watchdog
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.links import addresses
from pydtnn.comm.monitor.monitor import Facts
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.supervision import DEFAULT_TIMEOUT, Supervision

_FILE, _SOCKET, _SLOTS = "first", "ranks", "slots"

_MEMORY = "/dev/shm"
"""Folder in memory, where there is one: the files are never written to a disk."""

_PATIENCE = 2.0
"""Seconds to wait for the watchdog to start, which takes about 0.05 s."""


class Reporter:
    """Ensures that one rank of a host reports why a run ends, and that the watchdog reports a kill.

    The ranks of a host open one file; the rank that writes the first byte reports for all. A
    separate process reports a rank that terminates unexpectedly (`pydtnn.comm.watchdog`). The files
    are unlinked once all ranks have opened them, so none remains however the ranks end.

    The process also reads what each rank is doing, from a slot of shared memory; if it cannot be
    started, waits have no deadline.

    Collective: all ranks construct one.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    supervision : Supervision
        What this rank shares with the process.
    """

    def __init__(self, comm: Communicator) -> None:
        folder = _make_folder(comm.local_size) if comm.local_rank == 0 else None
        watched = comm.size > 1
        listener = _listen(folder) if folder is not None and watched else None
        links = _listen_to_hosts() if comm.rank == 0 and len({*comm.hosts}) > 1 else None
        port = links.getsockname()[1] if links is not None else 0
        own = folder, socket.gethostname(), addresses() if links else [], port, secrets.token_hex()
        known = comm.gather_object(own)
        folder = known[comm.hosts[comm.rank]][0]
        names = {str(host): known[host][1] for host in {*comm.hosts}}
        facts = Facts([*comm.hosts], comm.hosts[comm.rank], names, *known[0][2:])
        self._file = connection = None
        memory = memoryview(bytearray(SLOT))
        if folder is not None:
            self._file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND)
            memory = _share(folder, comm)
            connection = _connect(folder, comm.rank) if watched else None
        self.supervision = Supervision(Slot(memory), alone=not watched)
        self.supervision.slot.clear(comm.rank, DEFAULT_TIMEOUT)
        if listener is not None and self._file is not None and folder is not None:
            _start(listener, self._file, os.path.join(folder, _SLOTS), links, facts)
        if connection is not None:
            _wait(connection)
        self._connection = connection
        comm.barrier()
        if folder is not None and comm.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        comm.barrier()  # no rank terminates this one before it has removed the names
        atexit.register(self.leave)

    def connect(self, end: Callable[[int], None], end_by_signal: Callable[[int], None]) -> None:
        """Answer the process from now on: see `Supervision.connect`."""
        if self._connection is not None:
            self.supervision.connect(self._connection, end, end_by_signal)

    def is_first(self) -> bool:
        """Return whether no rank of this host has reported the end of the run yet, and claim it.

        If the file could not be created, every rank reports.
        """
        return self._file is None or watchdog.is_first(self._file)

    def leave(self) -> None:
        """Unregister this rank from the watchdog, so that its end is expected."""
        self.supervision.leave()


def _make_folder(ranks: int) -> str | None:
    """Make a folder with an empty file and memory for slots, or return None if that fails."""
    for place in (_MEMORY, None):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="pydtnn-", dir=place)
            os.close(os.open(os.path.join(folder, _FILE), os.O_CREAT, 0o600))
            with open(os.path.join(folder, _SLOTS), "xb") as file:
                os.posix_fallocate(file.fileno(), 0, ranks * SLOT)  # a full disk would kill ranks
            return folder
    return None


def _share(folder: str, comm: Communicator) -> memoryview:
    """Return this rank's slot of the memory that the ranks of the host share."""
    with open(os.path.join(folder, _SLOTS), "r+b") as file:
        memory = mmap.mmap(file.fileno(), comm.local_size * SLOT)
    return memoryview(memory)[comm.local_rank * SLOT :][:SLOT]


def _listen_to_hosts() -> socket.socket | None:
    """Open a socket for the processes of other hosts."""
    try:
        return socket.create_server(("", 0), backlog=1024)
    except OSError:
        return None


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


def _start(
    listener: socket.socket, file: int, slots: str, links: socket.socket | None, facts: Facts
) -> None:
    """Start the process, which inherits the listeners and ends after the last rank of this host."""
    memory = os.open(slots, os.O_RDWR)
    numbers = listener.fileno(), file, memory, links.fileno() if links is not None else -1
    root = os.path.dirname(os.path.dirname(__file__))
    counts = len(facts.ranks), len(facts.hosts)
    program = [sys.executable, "-I", "-S", watchdog.__file__, *map(str, (*numbers, *counts)), root]
    with contextlib.suppress(OSError), listener, links or contextlib.nullcontext():
        process = subprocess.Popen(
            program,
            pass_fds=[number for number in numbers if number >= 0],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # not terminated by Ctrl-C in a terminal
        )
        process.returncode = 0  # it outlives this rank, which need not wait for it
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(asdict(facts)).encode())
    os.close(memory)

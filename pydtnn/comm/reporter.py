"""Selection of the process of a host that reports why a run ends: a failed rank or the watchdog."""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict

from pydtnn.comm import watchdog
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.links import addresses, listen
from pydtnn.comm.monitor.monitor import Facts
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.supervision import DEFAULT_TIMEOUT, Supervision
from pydtnn.utils.terminal import launcher_of

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
    started, or ends before the ranks, each rank ends the run when its own wait lasts too long.

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
        known = comm.gather_object((folder, socket.gethostname(), addresses()))
        folder = known[comm.hosts[comm.rank]][0]
        names = {str(host): known[host][1] for host in {*comm.hosts}}
        facts = Facts([*comm.hosts], comm.hosts[comm.rank], names)
        links = None
        if len(names) > 1:
            if comm.rank == 0:
                links = listen(known[0][2], [known[host][2] for host in {*comm.hosts} - {0}])
            own = links.getsockname() if links is not None else ("", 0)
            facts.address, facts.port, facts.token = comm.gather_object((*own, _token()))[0]
        self._file = connection = None
        memory, places = memoryview(bytearray(SLOT)), 1
        if folder is not None:
            self._file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND)
            memory, places = _share(folder, comm), comm.local_size
            connection = _connect(folder, comm.rank) if watched else None
        slots = [Slot(memory, place) for place in range(places)]
        own_place = comm.local_rank if places > 1 else 0
        self.supervision = Supervision(slots, own_place, socket.gethostname(), alone=not watched)
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

    def connect(
        self, end: Callable[[int, str], None], end_by_signal: Callable[[int], None]
    ) -> None:
        """Answer the process from now on: see `Supervision.connect`."""
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
    """Return the memory with the slots of the ranks of the host."""
    with open(os.path.join(folder, _SLOTS), "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), comm.local_size * SLOT))


def _token() -> str:
    """Return a token of two halves, one for each side of a connection between hosts."""
    return secrets.token_hex(64)


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
    """Connect to the socket in the folder, if there is one, and send the number of the rank.

    With MPICH's launcher, the connection to it is sent along: see `watchdog`.
    """
    connection = socket.socket(socket.AF_UNIX)
    launcher = [int(text) for text in (os.environ.get("PMI_FD", ""),) if text.isdecimal()]
    try:
        connection.connect(os.path.join(folder, _SOCKET))
        socket.send_fds(connection, [b"%d\n" % rank], launcher)
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
    launcher = launcher_of(os.getppid())
    root = os.path.dirname(os.path.dirname(__file__))
    more = len(facts.ranks), len(facts.hosts), launcher
    program = [sys.executable, "-I", "-S", watchdog.__file__, *map(str, (*numbers, *more)), root]
    with contextlib.suppress(OSError), listener, links or contextlib.nullcontext():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watchdog.IGNORED)
        try:
            process = subprocess.Popen(
                program,
                pass_fds=[number for number in numbers if number >= 0],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # not terminated by Ctrl-C in a terminal
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process.returncode = 0  # it outlives this rank, which need not wait for it
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(asdict(facts)).encode())
    os.close(memory)

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from pydtnn.comm import watchdog
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.links import addresses, listen
from pydtnn.comm.monitor.monitor import Facts
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.supervision import DEFAULT_TIMEOUT, Supervision
from pydtnn.utils.launcher import is_first_on_host, launched_ranks, ranks_here
from pydtnn.utils.terminal import is_proxy, launcher_of

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
    started : Started, optional
        What `start_early` returned on the first rank of a host.

    Attributes
    ----------
    supervision : Supervision
        What this rank shares with the process.
    """

    def __init__(self, comm: Communicator, started: Started | None = None) -> None:
        watched = comm.size > 1
        if started is not None and (comm.local_rank, comm.local_size) != (0, started.ranks):
            started.cancel()  # the launcher counts in another way
            started = None
        if comm.local_rank == 0 and started is None:
            started = _start(comm.local_size, comm.size if watched else 1)
        own = started.folder if started is not None else None
        known = comm.gather_object((own, socket.gethostname(), addresses()))
        folder = known[comm.hosts[comm.rank]][0]
        names = {str(host): known[host][1] for host in {*comm.hosts}}
        facts = Facts([*comm.hosts], comm.hosts[comm.rank], names)
        links = None
        if len(names) > 1:
            if comm.rank == 0:
                links = listen(known[0][2], [known[host][2] for host in {*comm.hosts} - {0}])
            address = links.getsockname() if links is not None else ("", 0)
            facts.address, facts.port, facts.token = comm.gather_object((*address, _token()))[0]
        if started is not None:
            started.send(facts, links)
        self._file = connection = None
        memory, places = memoryview(bytearray(SLOT)), 1
        if folder is not None:
            self._file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND)
            memory, places = _share(folder, comm), comm.local_size
            connection = _connect(folder, comm.rank) if watched else None
        slots = [Slot(memory, place) for place in range(places)]
        place = comm.local_rank if places > 1 else 0
        self.supervision = Supervision(slots, place, socket.gethostname(), alone=not watched)
        self.supervision.slot.clear(comm.rank, DEFAULT_TIMEOUT)
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


class Started:
    """The process of a host, started by its first rank, and the folder of the files.

    Parameters
    ----------
    folder : str
    ranks : int
        Number of ranks of the host.
    process : int
        0 if it could not be started.
    control : socket or None
        Its standard input.
    """

    def __init__(
        self,
        folder: str,
        ranks: int,
        process: int = 0,
        control: socket.socket | None = None,
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self._process, self._control = process, control

    def send(self, facts: Facts, links: socket.socket | None) -> None:
        """Send what is known once ranks communicate, and the listener for other hosts."""
        files = [links.fileno()] if links is not None else []
        with self._control or contextlib.nullcontext(), links or contextlib.nullcontext():
            if self._control is not None:
                with contextlib.suppress(OSError):  # it has been killed
                    text = json.dumps(asdict(facts)).encode()
                    socket.send_fds(self._control, [text[:1]], files)
                    self._control.sendall(text[1:])

    def cancel(self) -> None:
        """End the process and remove the files."""
        if self._process and self._control is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process, signal.SIGKILL)
            self._control.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def start_early() -> Iterator[Started | None]:
    """Context in which ranks start MPI: the process already watches those of MPICH's launcher.

    Only the first rank of a host starts it. An error in the context ends it.
    """
    ranks, started = launched_ranks() or 1, None
    if ranks > 1 and "PMI_FD" in os.environ and is_first_on_host():
        starting = watchdog.find_ranks(os.getppid()) if is_proxy(os.getppid()) else {}
        started = _start(ranks_here(), ranks, starting)
    try:
        yield started
    except BaseException:
        if started is not None:
            started.cancel()
        raise


def _start(ranks: int, of: int, starting: Mapping[int, int] | None = None) -> Started | None:
    """Make the folder of a host, and start the process if there are several ranks.

    It inherits the listener and ends after the last rank of this host; `starting` is what
    `watchdog.find_ranks` has returned.
    """
    folder = _make_folder(ranks)
    if folder is None:
        return None
    listener = _listen(folder) if of > 1 else None
    if listener is None:
        return Started(folder, ranks)
    file = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND)
    memory = os.open(os.path.join(folder, _SLOTS), os.O_RDWR)
    numbers = listener.fileno(), file, memory
    starting = starting or {}
    pairs = ",".join(f"{one}:{rank}" for one, rank in starting.items())
    own, control = socket.socketpair()
    root = os.path.dirname(os.path.dirname(__file__))
    facts = *numbers, ranks, of, launcher_of(os.getppid()), pairs
    program = [sys.executable, "-I", "-S", watchdog.__file__, *map(str, facts), root]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watchdog.IGNORED)
    try:
        with listener, control:
            process = subprocess.Popen(
                program,
                pass_fds=[*numbers, *starting],
                stdin=control.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # not terminated by Ctrl-C in a terminal
            )
    except OSError:
        own.close()
        return Started(folder, ranks)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for one in (file, memory, *starting):
            os.close(one)
    process.returncode = 0  # it outlives this rank, which need not wait for it
    return Started(folder, ranks, process.pid, own)


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

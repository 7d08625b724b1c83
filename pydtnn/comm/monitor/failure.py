"""Termination of a run on several ranks when one of them fails.

A rank that fails prints one line and aborts the job: the others may be waiting for it inside MPI
and would deadlock. If several fail at once, the first on each host reports. A killed rank is
reported by the monitor process of its host (`pydtnn.comm.monitor`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.links import (
    FORWARDING_S,
    LOST_STATUS,
    READY,
    MessageSocket,
    addresses,
    line,
    listen,
)
from pydtnn.comm.monitor.signals import SignalWatch, describe_signal
from pydtnn.comm.monitor.slots import SLOT, SURVIVES, Facts, Slot, slots_in
from pydtnn.comm.monitor.supervision import DEFAULT_TIMEOUT_S, LAST_RECORD_S, Supervision
from pydtnn.utils.errors import (
    AgreedError,
    RankError,
    describe,
    requested_traceback,
    write_error,
)
from pydtnn.utils.launcher import is_first_on_host, launched_ranks, local_ranks, survives
from pydtnn.utils.terminal import is_proxy

_SOCKET, _SLOTS = "ranks", "slots"

_MEMORY = "/dev/shm"
"""Folder in memory, where there is one: the files are never written to a disk."""

_MONITOR_START_S = 2.0
"""Seconds to wait for the monitor process to start, which takes about 0.05 s."""


def _supervise(comm: Communicator, started: Started | None = None) -> Supervision:
    """Connect this rank to the monitor process of its host. Collective: all ranks call it.

    The first rank of a host starts the process, unless `started` is what `start_early` returned
    there. The ranks of a host share a file of slots, in which the process reads what each of them
    is doing, and to which the one that reports the end of the run appends a byte. It is unlinked
    once all ranks have opened it, so that it does not remain however the ranks end.
    """
    several = comm.size > 1
    if started is not None and (comm.local_rank, comm.local_size) != (0, started.ranks):
        started.cancel()  # the launcher counts in another way
        started = None
    if comm.local_rank == 0 and started is None:
        started = _start(comm.local_size, comm.size if several else 1)
    own = started.folder if started is not None else None
    known = comm.gather_object((own, socket.gethostname(), addresses()))
    folder = known[comm.hosts[comm.rank]][0]
    names = {str(host): known[host][1] for host in {*comm.hosts}}
    facts = Facts([*comm.hosts], comm.hosts[comm.rank], names, files=_memory_files())
    links = None
    if len(names) > 1:
        if comm.rank == 0:
            links = listen(known[0][2], [known[host][2] for host in {*comm.hosts} - {0}])
        address = links.getsockname() if links is not None else ("", 0)
        token = secrets.token_hex(64)  # of two halves, one for each side of a connection
        facts.address, facts.port, facts.token = comm.gather_object((*address, token))[0]
    if started is not None:
        started.send(facts, links)
    file = connection = None
    slots = [Slot(memoryview(bytearray(SLOT)))]
    if folder is not None:
        file = os.open(os.path.join(folder, _SLOTS), os.O_WRONLY | os.O_APPEND)
        slots = _share(folder, comm)
        connection = _connect(folder, comm.rank) if several else None
    place = comm.local_rank if len(slots) > 1 else 0
    slots[place].clear(comm.rank, DEFAULT_TIMEOUT_S)
    slots[place].words[SURVIVES] = survives()  # until it is known whether the run does
    if connection is not None:
        _wait(connection.socket)
    comm.barrier()
    if folder is not None and comm.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    comm.barrier()  # no rank terminates this one before it has removed the names
    host = socket.gethostname()
    supervision = Supervision(
        slots, place, host, connection, file, alone=not several, size=comm.size
    )
    atexit.register(supervision.leave)
    return supervision


@dataclass
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

    folder: str
    ranks: int
    process: int = 0
    control: socket.socket | None = None

    def send(self, facts: Facts, links: socket.socket | None) -> None:
        """Send what is known once ranks communicate, and the listener for other hosts."""
        files = [links.fileno()] if links is not None else []
        with self.control or contextlib.nullcontext(), links or contextlib.nullcontext():
            if self.control is not None:
                with contextlib.suppress(OSError):  # it has been killed
                    text = json.dumps(asdict(facts)).encode()
                    socket.send_fds(self.control, [text[:1]], files)
                    self.control.sendall(text[1:])

    def cancel(self) -> None:
        """End the process and remove the files."""
        if self.process and self.control is not None:
            with contextlib.suppress(OSError):
                os.kill(self.process, signal.SIGKILL)
            self.control.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def start_early() -> Iterator[Started | None]:
    """Context in which ranks start MPI: the process already watches those of MPICH's launcher.

    Only the first rank of a host starts it. An error in the context ends it.
    """
    ranks, started = launched_ranks() or 1, None
    if ranks > 1 and "PMI_FD" in os.environ and is_first_on_host():
        from pydtnn.comm.monitor.processes import find_ranks

        starting = find_ranks(os.getppid()) if is_proxy(os.getppid()) else {}
        started = _start(local_ranks(), ranks, starting)
    try:
        yield started
    except BaseException:
        if started is not None:
            started.cancel()
        raise


def _start(ranks: int, of: int, starting: Mapping[int, int] | None = None) -> Started | None:
    """Make the folder of a host, and start the process if there are several ranks.

    It inherits the listener and ends after the last rank of this host; `starting` is what
    `find_ranks` has returned.
    """
    folder = _make_folder(ranks)
    if folder is None:
        return None
    listener = _listen(folder) if of > 1 else None
    if listener is None:
        return Started(folder, ranks)
    from pydtnn.comm.monitor import process

    slots = os.open(os.path.join(folder, _SLOTS), os.O_RDWR)
    numbers = listener.fileno(), slots
    starting = starting or {}
    own, control = socket.socketpair()
    root = str(Path(__file__).parents[2])
    known = *numbers, ranks * SLOT, ranks, of, [*starting.items()]
    program = [sys.executable, "-I", "-S", process.__file__, json.dumps(known), root]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process.IGNORED)
    try:
        with listener, control:
            monitor = subprocess.Popen(
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
        for one in (slots, *starting):
            os.close(one)
    monitor.returncode = 0  # it outlives this rank, which need not wait for it
    return Started(folder, ranks, monitor.pid, own)


def _make_folder(ranks: int) -> str | None:
    """Make a folder with memory for slots, or return None if that fails."""
    for place in (_MEMORY, None):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="pydtnn-", dir=place)
            try:
                with open(os.path.join(folder, _SLOTS), "xb") as file:  # a full disk kills ranks
                    os.posix_fallocate(file.fileno(), 0, ranks * SLOT)
                return folder
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
    return None


def _share(folder: str, comm: Communicator) -> list[Slot]:
    """Return the slots of the ranks of the host."""
    with open(os.path.join(folder, _SLOTS), "r+b") as file:
        return slots_in(file.fileno(), comm.local_size)


def _memory_files() -> list[str]:
    """Return the files by which MPICH's ranks of this host communicate."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return re.findall(rf"{_MEMORY}/mpich_shm_\w+$", maps.read(), re.M)
    return []


def _listen(folder: str) -> socket.socket | None:
    """Open a socket in the folder if the system supports all that the monitor process uses."""
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


def _connect(folder: str, rank: int) -> MessageSocket | None:
    """Connect to the socket in the folder, if there is one, and send the number of the rank.

    With MPICH's launcher, the connection to it is sent along: see `RankConnection.receive`.
    """
    connection = socket.socket(socket.AF_UNIX)
    launcher = [int(text) for text in (os.environ.get("PMI_FD", ""),) if text.isdecimal()]
    try:
        connection.connect(os.path.join(folder, _SOCKET))
        socket.send_fds(connection, [line("rank", rank)], launcher)
    except OSError:
        connection.close()
        return None
    return MessageSocket(connection)


def _wait(connection: socket.socket) -> None:
    """Wait until all ranks are watched: before that, the rank that ends cannot be identified."""
    connection.settimeout(_MONITOR_START_S)
    with contextlib.suppress(OSError):
        connection.recv(len(READY))
    connection.settimeout(None)


_FIRST_FAILURE_S = 1.0
"""Seconds during which a rank lets a rank that failed before it print and abort."""

_ABORT_TIMEOUT_S = 5.0
"""Seconds allowed for describing an error and aborting; then the process exits on its own."""


def end_all_ranks_on_error(comm: Communicator, started: Started | None = None) -> FailureHooks:
    """Terminate all ranks on an uncaught error of one of them. Collective: all ranks call it.

    From then on an uncaught exception, in any thread, prints "rank 3: reason" to the standard error
    once and aborts all ranks with status 1; with PYDTNN_TRACEBACK=1 the traceback precedes it. An
    `AgreedError`, which all ranks raise together, is printed by rank 0 without an abort. SIGINT
    (Ctrl-C), SIGTERM and SIGHUP terminate all ranks at once with status 130, 143 and 129, even
    while the rank waits inside MPI, where Python's own handlers would not run. A second signal ends
    the process immediately; SIGHUP has no effect if it is ignored, as by `nohup`. A killed rank is
    reported as well if all ranks are on one host or the system ran out of memory; the launcher
    then terminates the others.

    Parameters
    ----------
    comm : Communicator
        All ranks of the run. With one rank there is no prefix, and the interpreter ends as usual.
    started : Started, optional
        What `start_early` returned on the first rank of a host.

    Returns
    -------
    Failure
    """
    failure = FailureHooks(comm, started)
    failure.install()
    return failure


def leave(status: int) -> None:
    """End the program with an exit status, also if ranks fail at this moment."""
    failure = watched_failure()
    if failure is not None and survives():
        failure.leave(status)
    sys.exit(status)


def watched_failure() -> FailureHooks | None:
    """Return what `end_all_ranks_on_error` has returned last, or None."""
    failure = getattr(sys.excepthook, "__self__", None)
    return failure if isinstance(failure, FailureHooks) else None


def watched() -> Communicator | None:
    """Return the communicator given to `end_all_ranks_on_error`, or None."""
    failure = watched_failure()
    return None if failure is None else failure.comm


class FailureHooks:
    """The hooks of `end_all_ranks_on_error`, which end all ranks when this one fails.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    started : Started, optional
        What `start_early` returned on the first rank of a host.
    """

    def __init__(self, comm: Communicator, started: Started | None = None) -> None:
        self.comm = comm
        self.supervision = _supervise(comm, started)
        self._signals: SignalWatch | None = None

    def install(self) -> None:
        self.supervision.connect(self._end_with, self._end_by_signal)
        before = getattr(sys.excepthook, "__self__", None)
        if isinstance(before, FailureHooks):  # of an earlier communicator of this run
            before._withdraw()
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        if self.comm.size > 1 and threading.current_thread() is threading.main_thread():
            self._signals = SignalWatch(
                _defer_to_signal_thread,
                self._end_by_signal,
                self.supervision.last_step,
                self.supervision.request_table,
                always=(signal.SIGINT, signal.SIGTERM),  # even if the launcher ignores them
                grace=_ABORT_TIMEOUT_S,  # the others would wait if it ended without an abort
            )

    def _withdraw(self) -> None:
        """Uninstall the handlers when a later communicator installs its own."""
        self.supervision.leave()
        if self._signals is not None and threading.current_thread() is threading.main_thread():
            self._signals.stop()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AgreedError):
            if self.comm.size > 1:
                self.supervision.claim_report()  # from now on ranks have a deadline
            if self.comm.rank == 0:
                _print(f"{describe(error)}\n")
            if self.comm.rank in error.ranks[:1]:
                _print(requested_traceback(error))
            if survives():
                self.leave(error.status)
            if error.status != 1:  # Python's own
                raise SystemExit(error.status)
        elif self.comm.size == 1:
            _print(f"{requested_traceback(error)}{describe(error)}\n")
        else:
            self._end_by(error)

    def leave(self, status: int) -> None:
        """End this process without MPI_Finalize, where Open MPI may wait for ranks that fail."""
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None and args.exc_type is not SystemExit:
            self._end_by(error)  # code that joins this thread would deadlock, with one rank as well

    def _end_with(self, code: int, reason: str) -> None:
        """Terminate all ranks; an empty reason has been printed."""
        exit_after(_ABORT_TIMEOUT_S, code)
        if reason:
            self._end(reason, code)
        self.comm.abort(code)

    def _end_by(self, error: BaseException) -> None:
        """Terminate all ranks, even if describing the error fails."""
        reason, trace = type(error).__name__, ""
        code = LOST_STATUS if is_lost(error) else 1
        exit_after(_ABORT_TIMEOUT_S, code)
        try:
            reason, trace = describe(error), requested_traceback(error)
            if code == LOST_STATUS:
                time.sleep(FORWARDING_S)  # the monitor process may know which rank was killed
        finally:
            named = isinstance(error, RankError)  # one of several ranks of this process
            self._end(f"{trace}{'' if named else self._prefix()}{reason}", code)

    def _end(self, reason: str, code: int) -> None:
        try:
            first = self.supervision.claim_report()
            if first:
                _print(f"{reason}\n")
            self.supervision.record("an error", LAST_RECORD_S)
            time.sleep(FORWARDING_S if first else _FIRST_FAILURE_S)
        finally:
            self.comm.abort(code)

    def _prefix(self) -> str:
        return f"rank {self.comm.rank}: " if self.comm.size > 1 else ""

    def _end_by_signal(self, number: int) -> None:
        reason = f"{self._prefix()}{describe_signal(number)}{self._elsewhere(number)}"
        self._end(reason, 128 + number)

    def _elsewhere(self, number: int) -> str:
        """Return other possible causes of SIGTERM, if no process monitors all ranks."""
        if number == signal.SIGTERM and self.comm.local_size < self.comm.size:
            return "; launchers send it to all ranks where one has ended"
        return ""


def is_lost(error: BaseException) -> bool:
    """Return whether a call of MPI has failed, as another rank, a host or the network has."""
    return type(error).__module__.startswith("mpi4py.")


def exit_after(seconds: float, code: int) -> None:
    """Terminate this process after a delay, if it is still running."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _defer_to_signal_thread(number: int, frame: FrameType | None) -> None:
    """Prevent KeyboardInterrupt in Python, and termination of this rank alone by the system."""


def _print(text: str) -> None:
    """Write after what has been printed; ignore errors of the stream."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    write_error(text)

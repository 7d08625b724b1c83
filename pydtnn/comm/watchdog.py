"""The monitor process of a host, which identifies a rank that terminates unexpectedly.

A rank that is killed, by a signal or by the out-of-memory killer, leaves no message, and MPICH's
launcher kills the other ranks at the same moment, so that they cannot report it either. The
launcher does not manage this process. Every rank holds a connection to it, which the system closes
however the rank ends; a rank that ends normally sends a message first.

The system counts the processes that it has killed because memory was exhausted. If that counter
has just increased, this is the cause. Otherwise the cause can be determined only if all ranks are
on one host: the launcher terminates the ranks of every host in the same way, and no process
observes on which host the first one ended.

The process also observes what each rank is doing (`pydtnn.comm.monitor`), and ends the others when
one has terminated unexpectedly. Signals that are sent to every process of a job do not end it
before its ranks. The file is run by its path and imports no NumPy, so that it is small and starts
fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Protocol

LEAVING = b"."
"""Last message of a rank that ends normally; the first one is its number and a line feed."""

READY = b"!"
"""Message to every rank once all of them are watched."""


COUNTERS = "/proc/vmstat"
"""File with the event counters of Linux."""

LATELY = 30.0
"""Seconds during which a kill counts as recent, as a large process takes a while to terminate."""

FAILING = 1.0
"""Seconds in which an error of all ranks before they are connected ends this process."""

INTERVAL = 0.5
"""Seconds between two looks at what the ranks are doing."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals for the ranks, which end or report; this process ends after them."""

MAX_LINE = 1 << 10
"""Longest message of a rank, in B."""

CRASHED = "it crashed, was killed or called os._exit"
"""Why a rank has ended, if nothing else is known."""

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux


class Service(Protocol):
    """An object that handles the messages of ranks, and observes them at intervals."""

    def begin(self, poll: select.epoll) -> None:
        """Register further files."""

    def joined(self, rank: int, connection: socket.socket) -> None:
        """Called when a rank has connected."""

    def left(self, rank: int) -> None:
        """Called when a rank has ended normally."""

    def failed(self, rank: int, reported: bool) -> None:
        """End all other ranks, as one has terminated unexpectedly.

        If a rank has `reported` an error, it ends them itself, unless it fails to.
        """

    def event(self, number: int) -> bool:
        """Handle an event of a file; return whether it belongs to this object."""

    def heard(self, rank: int, line: str) -> None:
        """Handle a message of a rank."""

    def look(self) -> None:
        """Observe the ranks; called every `INTERVAL` seconds."""


class Kills:
    """Number of processes that the system has killed because memory was exhausted.

    Parameters
    ----------
    path : str
        File of counters, each line a name and a number.
    """

    def __init__(self, path: str = COUNTERS) -> None:
        self._path = path
        self._before = self._newer = self._count()
        self._at = time.monotonic()

    def remember(self, seconds: float = 0.0) -> None:
        """Regard the kills counted at the previous call as past, if it is `seconds` ago."""
        if time.monotonic() >= self._at + seconds:
            self._before, self._newer, self._at = self._newer, self._count(), time.monotonic()

    def recent(self) -> bool:
        """Return whether there were kills that are not past."""
        return self._count() > self._before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError), open(self._path) as file:
            for line in file:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        return 0  # this system does not count them


class Launcher:
    """The process that has started the ranks, such as mpirun, if it is on this host.

    If it is killed, or ended by SIGHUP, its processes kill the ranks, and what they write is not
    forwarded any more; its own standard error is still open here.

    Parameters
    ----------
    process : int
        0 for none.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._watched, self._errors = -1, 2
        with contextlib.suppress(AttributeError, OSError):  # Linux only, and no sockets
            self._watched = os.pidfd_open(process)
            path = f"/proc/{process}/fd/2"
            self._errors = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)

    def end(self) -> str | None:
        """Return what to report if it has ended."""
        if self._watched < 0 or not select.select([self._watched], [], [], 0)[0]:
            return None
        return (
            f"mpirun: process {self._process} has ended, by a signal or because its terminal was "
            "closed, and all ranks with it"
        )

    def write(self, text: bytes) -> None:
        """Write to the standard error of the ranks, or that of the launcher if it has ended."""
        with contextlib.suppress(OSError):
            os.write(2 if self.end() is None else self._errors, text)


def watch(
    listener: socket.socket,
    ranks: int,
    pause: Callable[[], None] = lambda: None,
    seconds: float = LATELY,
    create: Callable[[], Service] | None = None,
    report: Callable[[int], bool] = lambda rank: False,
    starting: Mapping[int, int] | None = None,
) -> int | None:
    """Wait until all ranks have ended normally, or one has terminated unexpectedly.

    Parameters
    ----------
    listener : socket
        Socket that the ranks connect to.
    ranks : int
        Number of ranks. Each receives `READY` once all have connected.
    pause : callable
        Called whenever no event has occurred for `seconds`.
    seconds : float
    create : callable, optional
        Creates the object that handles the lines that ranks send between the first message and the
        last. Called after `READY`, so that ranks need not wait for its imports.
    report : callable
        Called with the rank that terminated unexpectedly; returns whether a rank had reported an
        error before.
    starting : mapping of int to int, optional
        Files that become readable when the process of a rank ends (pidfd), and the rank: until
        `READY`, a rank may end without a connection. The others are then terminated.

    Returns
    -------
    int or None
        The rank that terminated unexpectedly; if there are several, the first.
    """
    connections: dict[int, socket.socket] = {}
    words: dict[int, bytes] = {}
    numbers: dict[int, int] = {}
    service: Service | None = None
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        poll.register(listener, select.EPOLLIN)
        starting = dict(starting or {})
        for number in starting:
            poll.register(number, select.EPOLLIN)
        told = False
        look_at = 0.0
        while len(connections) < ranks or words:
            # Events arrive in the order in which they occurred, however late they are read: ranks
            # killed by the launcher follow the cause. But epoll keeps reported descriptors queued
            # until the next call: `READY` is sent once that queue is empty.
            tell = len(connections) == ranks and not told
            events = poll.poll(0 if tell else seconds)
            if not events and tell:
                told = True
                for number in starting:
                    poll.unregister(number)
                for one in connections.values():
                    with contextlib.suppress(OSError):  # it has ended; its event follows
                        one.sendall(READY)
                if create is not None:
                    service = create()
                    service.begin(poll)
                    for number, rank in numbers.items():
                        service.joined(rank, connections[number])
            elif not events:
                pause()
            if service is not None and time.monotonic() >= look_at:  # however many messages arrive
                service.look()
                look_at = time.monotonic() + seconds
            for number, _ in events:
                if number == listener.fileno():
                    connection = stack.enter_context(listener.accept()[0])
                    connections[connection.fileno()] = connection
                    words[connection.fileno()] = b""
                    poll.register(connection, select.EPOLLIN)
                elif number in starting:
                    rank = starting.pop(number)
                    poll.unregister(number)
                    if not told and rank not in numbers.values():
                        return _end_start(rank, starting, report)
                elif service is not None and service.event(number):
                    continue
                elif said := _receive(connections[number], stack):
                    *lines, begun = (words[number] + said).split(b"\n")
                    words[number] = begun[:MAX_LINE]
                    if number not in numbers and lines:
                        numbers[number] = int(lines.pop(0))
                        if service is not None:
                            service.joined(numbers[number], connections[number])
                    if service is not None:
                        for line in lines:
                            service.heard(numbers[number], line.decode(errors="replace"))
                else:
                    rank = numbers.get(number, -1)
                    if words.pop(number) != LEAVING:
                        if not told:
                            return _end_start(rank, starting, report)
                        reported = report(rank)
                        if service is not None:
                            service.failed(rank, reported)
                        return rank
                    if service is not None:
                        service.left(rank)
                    poll.unregister(number)
    return None


def _end_start(rank: int, others: Mapping[int, int], report: Callable[[int], bool]) -> int:
    """Report a rank that has ended before all were connected, and terminate the others."""
    time.sleep(FAILING)
    report(rank)
    for number in others:
        with contextlib.suppress(OSError):  # it has ended, too
            signal.pidfd_send_signal(number, signal.SIGTERM)
    return rank


def find_ranks(parent: int) -> dict[int, int]:
    """Return a pidfd of each rank that a process of MPICH's launcher has started, and the rank."""
    found = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{process}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) != parent:
                    continue
            with open(f"/proc/{process}/environ", "rb") as file:
                rank = int(file.read().partition(b"\0PMI_RANK=")[2].partition(b"\0")[0])
            found[os.pidfd_open(int(process))] = rank
    return found


def _receive(connection: socket.socket, stack: contextlib.ExitStack) -> bytes:
    """Return the message of a rank; empty if it has ended.

    Files that come with it are kept open. The connection of a rank to its launcher is one: MPICH's
    kills the other ranks as soon as that is closed, and returns status 0 where the rank has exited
    with 0. With the connection open, this process ends them first, with status 1.
    """
    try:
        said, files, _, _ = socket.recv_fds(connection, 1 << 12, 4)
    except ConnectionResetError:  # it ended before it had read `READY`
        return b""
    for file in files:
        stack.callback(os.close, file)
    return said


def is_first(file: int) -> bool:
    """Append a byte to a file, and return whether it is the only one.

    Appending is atomic, so exactly one of the processes that may report the end of a run is first.
    Each process must have opened the file itself.
    """
    os.write(file, b"x")
    return os.lseek(file, 0, os.SEEK_CUR) == 1


def explain(rank: int, for_memory: bool, all_here: bool, why: str = CRASHED) -> str | None:
    """Return why a rank has terminated unexpectedly, or None if that cannot be determined.

    Parameters
    ----------
    rank : int
    for_memory : bool
        Whether the out-of-memory killer has just killed a process of this host.
    all_here : bool
        Whether all ranks are on this host, so that the first to end is the cause.
    why : str
        What is reported in this case.
    """
    if for_memory:
        why = "the out-of-memory killer has just killed a process of this host"
    if for_memory or all_here:
        return f"{f'rank {rank}' if rank >= 0 else 'a rank'}: terminated unexpectedly; {why}"
    return None


def main() -> None:
    """Watch the ranks.

    The arguments are three open file descriptors, of the listener, of the file of `is_first` and of
    the slots, the number of ranks to watch, that of all ranks, the launcher's process (0 if it is
    not on this host), the result of `find_ranks` as "file:rank,file:rank", and the folder of this
    package. The standard input is a socket for the other facts.
    """
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    _continue_with_parent()
    *numbers, pairs, folder = sys.argv[1:]
    listener, file, slots, ranks, of, process = map(int, numbers)
    entries = [pair.split(":") for pair in pairs.split(",") if pair]
    starting = {int(one): int(rank) for one, rank in entries}
    launcher = Launcher(process)
    file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND)
    kills = Kills()
    why = "it ended before all ranks had started"

    def create() -> Service:
        nonlocal why
        why = CRASHED
        return _create_service(folder, slots, lambda: is_first(file))

    def pause() -> None:
        kills.remember(LATELY)

    def report(rank: int) -> bool:
        told = launcher.end() or explain(rank, kills.recent(), ranks == of, why)
        if told is None:
            return False
        reported = not is_first(file)
        if not reported:
            launcher.write(f"{told}\n".encode())
        return reported

    ended = set(select.select(starting, [], [], 0)[0])
    if starting and (ended or len(starting) < ranks):  # which was first is known if it is the only
        missing = {*range(ranks)} - {starting[one] for one in starting if one not in ended}
        _end_start(min(missing) if ranks == of and len(missing) == 1 else -1, starting, report)
        return
    watch(socket.socket(fileno=listener), ranks, pause, INTERVAL, create, report, starting)


def _continue_with_parent() -> None:
    """Have the system continue this process when the rank that started it ends.

    A process that is stopped would otherwise remain.
    """
    with contextlib.suppress(AttributeError, OSError, ImportError):  # Linux only
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH, int(signal.SIGCONT), 0, 0, 0)


def _create_service(folder: str, slots: int, claim: Callable[[], object]) -> Service:
    """Return the monitor, whose packages are imported without `__init__`, which imports NumPy."""
    for name in ("pydtnn", "pydtnn.comm"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        sys.modules[name] = module
    import json
    import mmap

    from pydtnn.comm.monitor.monitor import Facts, Monitor
    from pydtnn.comm.monitor.slots import SLOT, Slot

    text, files = b"", list[int]()
    with socket.socket(fileno=0) as facts:
        while received := socket.recv_fds(facts, 1 << 16, 1):
            text += received[0]
            files += received[1]
            if not received[0]:
                break
    own = Facts(**json.loads(text))
    memory = memoryview(mmap.mmap(slots, len(own.ranks) * SLOT))
    places = [Slot(memory, place) for place in range(len(own.ranks))]
    listener = socket.socket(fileno=files[0]) if files else None
    return Monitor(own, places, claim, listener)


if __name__ == "__main__":
    main()

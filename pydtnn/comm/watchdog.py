"""A process beside the ranks of a host that identifies a rank that terminates unexpectedly.

A rank that is killed, by a signal or by the out-of-memory killer, leaves no message, and MPICH's
launcher kills the other ranks at the same moment, so that they cannot report it either. The
launcher does not manage this process. Every rank holds a connection to it, which the system closes
however the rank ends; a rank that ends normally sends a message first.

The system counts the processes that it has killed because memory was exhausted. If that counter
has just increased, this is the cause. Otherwise the cause can be determined only if all ranks are
on one host: the launcher terminates the ranks of every host in the same way, and no process
observes on which host the first one ended.

The file is run by its path and imports no other module of this package, so that it is small and
starts fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable

LEAVING = b"."
"""Last message of a rank that ends normally; the first one is its number and a line feed."""

READY = b"!"
"""Message to every rank once all of them are watched."""


COUNTERS = "/proc/vmstat"
"""File with the event counters of Linux."""

LATELY = 30.0
"""Seconds during which a kill counts as recent, as a large process takes a while to terminate."""


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

    def remember(self) -> None:
        """Regard the kills counted at the previous call of this method as past."""
        self._before, self._newer = self._newer, self._count()

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


def watch(
    listener: socket.socket,
    ranks: int,
    pause: Callable[[], None] = lambda: None,
    seconds: float = LATELY,
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

    Returns
    -------
    int or None
        The rank that terminated unexpectedly; if there are several, the first.
    """
    connections: dict[int, socket.socket] = {}
    words: dict[int, bytes] = {}
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        poll.register(listener, select.EPOLLIN)
        told = False
        while len(connections) < ranks or words:
            # Events arrive in the order in which they occurred, however late they are read: ranks
            # killed by the launcher follow the cause. But epoll keeps reported descriptors queued
            # until the next call: `READY` is sent once that queue is empty.
            tell = len(connections) == ranks and not told
            events = poll.poll(0 if tell else seconds)
            if not events and tell:
                told = True
                for one in connections.values():
                    with contextlib.suppress(OSError):  # it has ended; its event follows
                        one.sendall(READY)
            elif not events:
                pause()
            for number, _ in events:
                if number == listener.fileno():
                    connection = stack.enter_context(listener.accept()[0])
                    connections[connection.fileno()] = connection
                    words[connection.fileno()] = b""
                    poll.register(connection, select.EPOLLIN)
                elif said := _receive(connections[number]):
                    words[number] += said
                else:
                    rank, _, last = words.pop(number).partition(b"\n")
                    if last != LEAVING:
                        return int(rank)
                    poll.unregister(number)
    return None


def _receive(connection: socket.socket) -> bytes:
    """Return the message of a rank; empty if it has ended."""
    try:
        return connection.recv(64)
    except ConnectionResetError:  # it ended before it had read `READY`
        return b""


def is_first(file: int) -> bool:
    """Append a byte to a file, and return whether it is the only one.

    Appending is atomic, so exactly one of the processes that may report the end of a run is first.
    Each process must have opened the file itself.
    """
    os.write(file, b"x")
    return os.lseek(file, 0, os.SEEK_CUR) == 1


def explain(rank: int, for_memory: bool, all_here: bool) -> str | None:
    """Return why a rank has terminated unexpectedly, or None if that cannot be determined.

    Parameters
    ----------
    rank : int
    for_memory : bool
        Whether the out-of-memory killer has just killed a process of this host.
    all_here : bool
        Whether all ranks are on this host, so that the first to end is the cause.
    """
    if for_memory:
        why = "the out-of-memory killer has just killed a process of this host"
        return f"rank {rank}: terminated unexpectedly; {why}"
    if all_here:
        return f"rank {rank}: terminated unexpectedly; it crashed or was killed"
    return None


def main() -> None:
    """Watch the ranks.

    The arguments are two open file descriptors, of the listener and of the file of `is_first`, the
    number of ranks to watch, and the number of all ranks.
    """
    listener, file, ranks, of = map(int, sys.argv[1:])
    file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND)
    kills = Kills()
    rank = watch(socket.socket(fileno=listener), ranks, kills.remember)
    if rank is None:
        return
    told = explain(rank, kills.recent(), ranks == of)
    if told is not None and is_first(file):
        os.write(2, f"{told}\n".encode())


if __name__ == "__main__":
    main()

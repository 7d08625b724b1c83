"""A process beside the ranks of a host, which names one that terminates unexpectedly.

A rank that is killed, by a signal or by the out-of-memory killer, leaves no message, and MPICH's
launcher kills the others at the same moment, so that they cannot report it either. The launcher
does not know this process. Every rank holds a connection to it, which the system closes however
the rank ends; a rank that leaves in order says so before.

The system counts the processes that it has killed for lack of memory. Where that number has just
grown, this is the cause. Otherwise it can only be told where all ranks are on one host: between
hosts the launcher ends the ranks of each host in the same way, and no process sees which was first.

It is run by its path and imports nothing of ours, so that it is small and there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable

LEAVING = b"."
"""The last word of a rank that leaves in order; the first is its number and a line feed."""

READY = b"!"
"""What a rank is told once all are watched."""


COUNTERS = "/proc/vmstat"
"""Where Linux counts what it does."""

LATELY = 30.0
"""Seconds; a large process may take a while from the kill to its end."""


class Kills:
    """Processes that the system has killed for lack of memory, counted.

    Parameters
    ----------
    path : str
        Its lines are names and numbers.
    """

    def __init__(self, path: str = COUNTERS) -> None:
        self._path = path
        self._before = self._newer = self._count()

    def remember(self) -> None:
        """Let what was counted when this was called last be the past."""
        self._before, self._newer = self._newer, self._count()

    def lately(self) -> bool:
        """Return whether there were any since the past."""
        return self._count() > self._before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError), open(self._path) as file:
            for line in file:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        return 0  # they are not counted here


def watch(
    listener: socket.socket,
    ranks: int,
    pause: Callable[[], None] = lambda: None,
    seconds: float = LATELY,
) -> int | None:
    """Wait until all ranks have left, or one has terminated unexpectedly.

    Parameters
    ----------
    listener : socket
        Ranks connect to it.
    ranks : int
        How many will. They are told when all have.
    pause : callable
        Called where nothing has happened for so many seconds.
    seconds : float

    Returns
    -------
    int or None
        The rank that terminated unexpectedly; of several the first.
    """
    connections: dict[int, socket.socket] = {}
    words: dict[int, bytes] = {}
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        poll.register(listener, select.EPOLLIN)
        told = False
        while len(connections) < ranks or words:
            # Events come in the order in which they happened, however late we look: what the
            # launcher kills comes after the cause. But epoll leaves what it has reported in its
            # queue until it has looked again: ranks are told once that queue is empty.
            tell = len(connections) == ranks and not told
            events = poll.poll(0 if tell else seconds)
            if not events and tell:
                told = True
                for one in connections.values():
                    with contextlib.suppress(OSError):  # it has ended, as we shall see
                        one.sendall(READY)
            elif not events:
                pause()
            for number, _ in events:
                if number == listener.fileno():
                    connection = stack.enter_context(listener.accept()[0])
                    connections[connection.fileno()] = connection
                    words[connection.fileno()] = b""
                    poll.register(connection, select.EPOLLIN)
                elif said := _hear(connections[number]):
                    words[number] += said
                else:
                    rank, _, last = words.pop(number).partition(b"\n")
                    if last != LEAVING:
                        return int(rank)
                    poll.unregister(number)
    return None


def _hear(connection: socket.socket) -> bytes:
    """Return what a rank says; nothing if it has ended."""
    try:
        return connection.recv(64)
    except ConnectionResetError:  # it has not even read that all are watched
        return b""


def is_first(file: int) -> bool:
    """Put a byte at the end of a file, and return whether it is the only one.

    Appending is atomic, so that of all who may explain the end of a run one finds itself the first.
    Each must have opened the file itself.
    """
    os.write(file, b"x")
    return os.lseek(file, 0, os.SEEK_CUR) == 1


def explain(rank: int, for_memory: bool, all_here: bool) -> str | None:
    """Say why a rank has terminated unexpectedly, where that can be known.

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

    The arguments are two open files, the listener's and `is_first`'s, the number of ranks to watch,
    and of all ranks.
    """
    listener, file, ranks, of = map(int, sys.argv[1:])
    file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND)
    kills = Kills()
    rank = watch(socket.socket(fileno=listener), ranks, kills.remember)
    if rank is None:
        return
    told = explain(rank, kills.lately(), ranks == of)
    if told is not None and is_first(file):
        os.write(2, f"{told}\n".encode())


if __name__ == "__main__":
    main()

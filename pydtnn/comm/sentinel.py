"""A process beside the ranks of a host, which tells whose end came without a word.

A rank that is killed, by hand or for want of memory, tells nobody, and MPICH's launcher kills the
others in the same moment, so that they cannot tell it either. This process is none that the
launcher knows. Every rank holds a connection to it, which the system closes however the rank ends;
a rank that leaves in order says so before.

It is run by its path and imports nothing of ours, so that it is small and there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys

LEAVING = b"."
"""The last word of a rank that leaves in order; the first is its number and a line feed."""

READY = b"!"
"""What a rank is told once all are watched."""


def watch(listener: socket.socket, ranks: int) -> int | None:
    """Wait until all ranks have left, or one has ended without a word.

    Parameters
    ----------
    listener : socket
        Ranks connect to it.
    ranks : int
        How many will. They are told when all have.

    Returns
    -------
    int or None
        The rank that ended without a word; of several the first.
    """
    connections: dict[int, socket.socket] = {}
    words: dict[int, bytes] = {}
    with select.epoll() as poll, contextlib.ExitStack() as stack:
        poll.register(listener, select.EPOLLIN)
        while len(connections) < ranks or words:
            # Events come in the order in which they happened, however late we look: what the
            # launcher kills comes after the cause.
            for number, _ in poll.poll():
                if number == listener.fileno():
                    connection = stack.enter_context(listener.accept()[0])
                    connections[connection.fileno()] = connection
                    words[connection.fileno()] = b""
                    poll.register(connection, select.EPOLLIN)
                    if len(connections) == ranks:
                        for one in connections.values():
                            with contextlib.suppress(OSError):  # it has ended, as we shall see
                                one.sendall(READY)
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


def main() -> None:
    """Watch the ranks; the arguments are two open files, the listener's and `is_first`'s."""
    listener, file, ranks = map(int, sys.argv[1:])
    file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND)
    rank = watch(socket.socket(fileno=listener), ranks)
    if rank is not None and is_first(file):
        why = "it crashed or was killed, perhaps for want of memory"
        os.write(2, f"rank {rank}: ended without a word; {why}\n".encode())


if __name__ == "__main__":
    main()

"""The ranks of a host as its monitor process sees them: their connections, and why they end.

A rank that is killed, by a signal or by the out-of-memory killer, leaves no message, and MPICH's
launcher kills the other ranks at the same moment, so that they cannot report it either. The
launcher does not manage the monitor process. Every rank holds a connection to it, which the system
closes however the rank ends; a rank that ends normally sends a message first.

The system counts the processes that it has killed because memory was exhausted. If that counter
has just increased, this is the cause. Otherwise the cause can be determined only if all ranks are
on one host: the launcher terminates the ranks of every host in the same way, and no process
observes on which host the first one ended.

The module is imported before the ranks are connected, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from pydtnn.comm.monitor.links import Message, MessageSocket, is_first, line
from pydtnn.utils.errors import write_error

COUNTERS = "/proc/vmstat"
"""File with the event counters of Linux."""

RECENT_KILL_S = 30.0
"""Seconds during which a kill counts as recent, as a large process takes a while to terminate."""

CRASHED = "it crashed, was killed or called os._exit"
"""Why a rank has ended, if nothing else is known."""


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


class EndReport:
    """Reports once per host why a run ends.

    Parameters
    ----------
    file : int
        See `pydtnn.comm.monitor.links.is_first`; opened for appending by this process.
    length : int
    kills : Kills
    all_here : bool
        Whether all ranks are on this host, so that the first to end is the cause.
    """

    def __init__(self, file: int, length: int, kills: Kills, all_here: bool) -> None:
        self._file, self._length = file, length
        self.kills, self._all_here = kills, all_here

    @property
    def claimed(self) -> bool:
        """Whether a process of the host has reported the end of the run."""
        return os.fstat(self._file).st_size > self._length

    def claim(self) -> bool:
        """Return whether this is the first process of the host to report the end of the run."""
        return is_first(self._file, self._length)

    def report(self, rank: int, why: str = CRASHED) -> bool:
        """Report that a rank has failed, if that is the cause as far as can be determined.

        Returns
        -------
        bool
            Whether a rank has reported an error before: it ends the others itself.
        """
        text = explain(rank, self.kills.recent(), self._all_here, why)
        if text is None:
            return False
        if not self.claim():
            return True
        write_error(f"{text}\n")
        return False


EDGES = select.EPOLLIN | select.EPOLLET
"""What is reported of ranks: events in the order in which they occurred, however late they are
read, as ranks that are killed by the launcher follow the cause. Without EPOLLET, a rank whose
message has been reported stays in the queue until the next call, and its end comes first there."""


class RankConnection(MessageSocket):
    """The connection of a rank to this process; the system closes it however the rank ends.

    Parameters
    ----------
    connection : socket

    Attributes
    ----------
    rank : int
        -1 until its first message.
    messages : list of Message
        Those that have arrived, to be removed by their reader.
    left : bool
        Whether the rank has announced its end.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.rank, self.left = -1, False
        self.messages: list[Message] = []
        self._files: list[int] = []

    def _data(self, length: int) -> bytes:
        data, files, _, _ = socket.recv_fds(self.socket, length, 4)
        self._files += files
        return data

    def read(self, poll: select.epoll) -> None:
        """Receive what the rank has sent; to be called if an object of `EDGES` reports the socket.

        Files that come with it are kept open. The connection of a rank to its launcher is one:
        MPICH's kills the other ranks as soon as that is closed, and returns status 0 where the rank
        has exited with 0. With the connection open, this process ends them first, with status 1.
        """
        for name, facts in self.receive():
            if name == "rank":
                self.rank = facts[0]
            elif name == "left":
                self.left = True
            else:
                self.messages.append((name, facts))
        if not self.closed:
            poll.modify(self, EDGES)  # if there is more, such as the end, it is reported next

    def send(self, name: str, *facts: object) -> bool:
        """Send a message, unless the rank has ended or does not read."""
        with contextlib.suppress(OSError):
            self.socket.send(line(name, *facts), socket.MSG_DONTWAIT)
        return not self.closed


class EndedEarlyError(Exception):
    """A rank has ended before all were connected.

    Attributes
    ----------
    rank : int
        -1 if it is unknown.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended")
        self.rank = rank


def accept_ranks(
    listener: socket.socket,
    ranks: int,
    poll: select.epoll,
    starting: dict[int, int] | None = None,
    starter: int | None = None,
) -> dict[int, RankConnection]:
    """Wait until all ranks are connected, and send `READY` to each.

    Parameters
    ----------
    listener : socket
        Socket that the ranks connect to.
    ranks : int
        Number of ranks.
    poll : epoll
        The connections remain registered.
    starting : dict of int to int, optional
        Files that become readable when the process of a rank ends (pidfd), and the rank, which may
        end without a connection. Those of ranks that have ended are removed.
    starter : int, optional
        A socket whose other end is that of the rank that has started this process.

    Returns
    -------
    dict of int to RankConnection
        By the number of the socket.

    Raises
    ------
    EndedEarlyError
    """
    connections: dict[int, RankConnection] = {}
    starting = {} if starting is None else starting
    for number in (listener.fileno(), *starting, *([] if starter is None else [starter])):
        poll.register(number, select.EPOLLIN)
    # `READY` is sent once the queue of events is empty.
    while events := poll.poll(0 if len(connections) == ranks else None):
        for number, _ in events:
            if number == listener.fileno():
                one = RankConnection(listener.accept()[0])
                connections[one.fileno()] = one
                poll.register(one, EDGES)
            elif number == starter:  # the facts, or the end
                poll.unregister(number)
                with socket.socket(fileno=os.dup(number)) as known:
                    if not known.recv(1, socket.MSG_PEEK):
                        raise EndedEarlyError(-1)
            elif number in starting:
                rank = starting.pop(number)
                poll.unregister(number)
                if rank not in [one.rank for one in connections.values()]:
                    raise EndedEarlyError(rank)
            else:
                one = connections[number]
                one.read(poll)
                if one.closed:
                    poll.unregister(number)
                    if not one.left:
                        raise EndedEarlyError(one.rank)
    poll.unregister(listener)
    for number in starting:
        poll.unregister(number)
    if starter is not None:
        with contextlib.suppress(OSError):  # it has sent the facts
            poll.unregister(starter)
    for one in connections.values():
        one.send("ready")
    return connections


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

"""Messages between ranks and the monitor process of their host, and between those of hosts.

A message is a line with a JSON list: its name, and what `MESSAGES` says. Other lines are ignored,
so that none ends a process. Ranks connect to their process by a local socket. The processes of
other hosts connect to that of the first one by TCP, and both sides begin with their half of the
run's token; a connection that begins with anything else is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

INTERVAL_S = 0.5
"""Seconds between two looks at the ranks of a host."""

FLIGHT_TIMEOUT_S = 5.0
"""Seconds to wait for the flight records of other hosts."""

FORWARDING_S = 0.3
"""Seconds for the launcher to forward what is printed: the end of ranks may overtake its pipes."""

LOST_STATUS = 75
"""Exit status of a run that has lost a rank, which may be started again."""

LINK_TIMEOUT_S = 3.0
"""Seconds to wait for a connection, for the token, and until a message can be sent."""

MAX_GREETING_BYTES = 256
"""Longest first line, in B."""

MAX_MESSAGE_BYTES = 1 << 26
"""Longest message, in B."""

OF_RANK = dict.fromkeys(("table", "signal", "begun", "flight", "failed", "expired"), (int, int))
"""Messages of a rank, or about it, with its number, and one more."""

MESSAGES: dict[str, tuple[type, ...]] = {
    **OF_RANK,
    "rank": (int,),  # the first message of a rank
    "left": (),  # and the last one, if it ends normally
    "exited": (int, dict),  # a rank that waits for others to leave, and its calls by group
    "ready": (),
    "freeze": (),
    "last": (int, int, int),  # step, signal, rank
    "finished": (),
    "end": (int,),  # status
    "exclude": (int,),  # rank
    "answer": (str, int),  # "stacks" or "flight", and the number of the request
    "rows": (int, list, str),  # the number of the request, rows and texts
}
"""Messages, and the types of what follows their names."""


_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux

Message = tuple[str, list[Any]]
"""The name of a message, and what follows."""


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host, without local ones."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def listen(own: Sequence[str], others: Sequence[Sequence[str]]) -> socket.socket | None:
    """Open a socket for the processes of other hosts, on the interface that leads to them.

    Parameters
    ----------
    own : sequence of str
        Addresses of this host.
    others : sequence of sequence of str
        Addresses of each other host. A host without addresses of its own is this machine, as in
        tests.
    """
    routes = (_route([one for one in host if one not in own]) for host in others)
    with contextlib.suppress(OSError):
        for address, _ in Counter(filter(None, routes)).most_common(1):
            return socket.create_server((address, 0), backlog=1024)
    return None


def _route(to: Sequence[str]) -> str | None:
    """Return the address of this host that packets to another one come from; None if none can."""
    for address in to or ["127.0.0.1"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect((address, 9))  # any port: nothing is sent
            return str(one.getsockname()[0])
    return None


def connect(address: str, port: int, token: str, host: int) -> HostLink | None:
    """Connect to the process of the first host."""
    with contextlib.suppress(OSError):
        link = HostLink(socket.create_connection((address, port), LINK_TIMEOUT_S), token, 0)
        link.greet(host)
        return link
    return None


def is_first(file: int, length: int) -> bool:
    """Append a byte to a file, and return whether it is the only one behind its first `length` B.

    Appending is atomic, so exactly one of the processes that may report the end of a run is first.
    Each process must have opened the file itself.
    """
    try:
        os.write(file, b"x")
    except OSError:  # there is no more room, or the size of files is limited
        return True
    return os.lseek(file, 0, os.SEEK_CUR) == length + 1


def line(name: str, *facts: object) -> bytes:
    """Return a message as it is sent."""
    return json.dumps([name, *facts]).encode() + b"\n"


def parse(text: bytes | bytearray) -> Message | None:
    """Return the message in a line; None if it is none. Integers are at least -1 and of 32 bits."""
    try:
        name, *facts = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    types = MESSAGES.get(name) if isinstance(name, str) else None
    integers = [fact for fact in facts if type(fact) is int]
    fits = types == tuple(map(type, facts)) and all(-1 <= one < 1 << 31 for one in integers)
    return (name, facts) if fits else None


READY = line("ready")
"""Message to every rank once all of them are watched."""


class MessageSocket:
    """A socket by which messages are sent and received.

    Parameters
    ----------
    connection : socket

    Attributes
    ----------
    closed : bool
        Whether the other side has closed it, or a message could not be sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.closed = connection, False
        self._begun = bytearray()

    def fileno(self) -> int:
        """Return the number of the socket."""
        return self.socket.fileno()

    def send(self, name: str, *facts: object) -> bool:
        """Send a message; return whether that is possible."""
        return self._send(line(name, *facts))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; to be called if the socket is readable."""
        return [message for text in self._lines() if (message := parse(text)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.socket.close()

    @property
    def _longest(self) -> int:
        return MAX_MESSAGE_BYTES

    def _send(self, data: bytes) -> bool:
        try:
            self.socket.sendall(data)
        except OSError:
            self.closed = True
        return not self.closed

    def _data(self, length: int) -> bytes:
        return self.socket.recv(length)

    def _lines(self) -> list[bytearray]:
        try:
            data = self._data(min(self._longest - len(self._begun), 1 << 16))
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self._begun += data
        if b"\n" in data:
            *lines, self._begun = self._begun.split(b"\n")
            return lines
        if len(self._begun) >= self._longest:
            self.close()
        return []


class HostLink(MessageSocket):
    """A connection to the process of another host.

    Parameters
    ----------
    connection : socket
    token : str
        Of the run. The process that connects sends its first half, with the number of its host; the
        other one answers with the second half.
    host : int
        The other host; -1 if it has not sent its token yet.

    Attributes
    ----------
    known : bool
        Whether the other side has sent its half of the token.
    """

    def __init__(self, connection: socket.socket, token: str, host: int = -1) -> None:
        super().__init__(connection)
        connection.settimeout(LINK_TIMEOUT_S)
        halves = token[: len(token) // 2], token[len(token) // 2 :]
        self._half, self._expected = halves if host >= 0 else halves[::-1]
        self.host, self.known = host, False

    def greet(self, host: int = 0) -> None:
        """Send this side's half of the token, and the number of this host."""
        self._send(f"{self._half} {host}\n".encode())

    @property
    def _longest(self) -> int:
        return MAX_MESSAGE_BYTES if self.known else MAX_GREETING_BYTES

    def _lines(self) -> list[bytearray]:
        lines = super()._lines()
        if lines and not self.known:
            from hmac import compare_digest  # takes longer than the start of the process

            half, _, host = bytes(lines.pop(0)).partition(b" ")
            same = compare_digest(half, self._expected.encode())
            self.known = same and host.isdigit() and len(host) < 10
            if not self.known:
                self.close()
                return []
            self.host = int(host) if self.host < 0 else self.host
        return lines

"""Messages between the monitor processes of several hosts: lines of JSON over TCP.

The process of the first host listens, those of the other hosts connect to it. Both sides begin with
their half of the run's token; a connection that begins with anything else is closed. What follows
is checked as well (`check_message`), so that no message ends a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any

LINK_TIMEOUT_S = 3.0
"""Seconds to wait for a connection, for the token, and until a message can be sent."""

MAX_GREETING_BYTES = 256
"""Longest first line, in B."""

MAX_MESSAGE_BYTES = 1 << 26
"""Longest message, in B."""

NUMBERS = {"table": 0, "signal": 1, "begun": 1, "failed": 1, "finish": 0, "flight": 0}
"""Messages of ranks, and how many numbers follow."""

LINES = ("stacks", "finish", "flight")
"""Lines of requests for what the ranks do and answer; with "flight" there is no answer."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux

Message = dict[str, Any]


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


class HostLink:
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
    since : float
        When the connection was made.
    """

    def __init__(self, connection: socket.socket, token: str, host: int = -1) -> None:
        connection.settimeout(LINK_TIMEOUT_S)
        self._socket = connection
        self._token = token
        self._begun = bytearray()
        self._connects = host >= 0
        self.host = host
        self.known = self.closed = False
        self.since = time.monotonic()

    def fileno(self) -> int:
        """Return the number of the socket."""
        return self._socket.fileno()

    def greet(self, host: int = 0) -> None:
        """Send this side's half of the token, and the number of this host."""
        self._send(f"{self._half(self._connects)} {host}\n".encode())

    def tell(self, message: Message) -> bool:
        """Send a message; return whether the connection is open."""
        return self._send(json.dumps(message).encode() + b"\n")

    def heard(self) -> list[Message]:
        """Return the messages that have arrived; to be called if the socket is readable.

        Lines that are no messages are left out.
        """
        longest = MAX_MESSAGE_BYTES if self.known else MAX_GREETING_BYTES - len(self._begun)
        try:
            data = self._socket.recv(min(longest, 1 << 16))
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self._begun += data
        if b"\n" not in data:
            if len(self._begun) >= (MAX_MESSAGE_BYTES if self.known else MAX_GREETING_BYTES):
                self.close()
            return []
        *lines, begun = self._begun.split(b"\n")
        self._begun = bytearray(begun)
        if not self.known and not self._accept(bytes(lines.pop(0))):
            self.close()
            return []
        return [message for line in lines if (message := check_message(line)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendall(data)
        except OSError:
            self.closed = True
        return not self.closed

    def _half(self, first: bool) -> str:
        middle = len(self._token) // 2
        return self._token[:middle] if first else self._token[middle:]

    def _accept(self, line: bytes) -> bool:
        """Check the first line of the other side."""
        half, _, host = line.partition(b" ")
        self.known = compare_digest(half, self._half(not self._connects).encode())
        self.known = self.known and host.isdigit() and len(host) < 10
        if self.known and not self._connects:
            self.host = int(host)
        return self.known


def check_message(line: bytes | bytearray) -> Message | None:
    """Return the message of another host, with entries of the right types; None if it is none.

    A message has the entry "what"; those of `NUMBERS` also "rank" and "numbers", the others "line",
    "status", "rank", "request", "rows" and "stacks" as they need them.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    what = message.get("what") if isinstance(message, dict) else None
    if not isinstance(what, str):
        return None
    if what in NUMBERS:
        numbers = message.get("numbers")
        fits = isinstance(numbers, list) and len(numbers) == NUMBERS[what]
        return message if fits and all(map(is_count, [*numbers, message.get("rank")])) else None
    expected = {
        "expired": True,
        "end": is_count(message.get("status")),
        "exclude": is_count(message.get("rank")),
        "tell": isinstance(message.get("line"), str) and "\n" not in message["line"],
        "rows?": message.get("line") in LINES and is_count(message.get("request")),
        "rows": isinstance(message.get("rows"), list)
        and isinstance(message.get("stacks"), str)
        and is_count(message.get("request")),
    }
    return message if expected.get(what, False) else None


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least -1 that fits into 32 bits."""
    return type(value) is int and -1 <= value < 1 << 31


def is_number(value: object) -> bool:
    """Return whether a value is a finite number of at most 64 bits."""
    if type(value) is int:
        return abs(value) < 1 << 63
    return type(value) is float and math.isfinite(value)

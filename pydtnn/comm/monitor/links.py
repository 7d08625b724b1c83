"""Messages between the processes that watch the ranks of each host: lines of JSON over TCP.

The process of the first host listens, those of the other hosts connect to it. A connection that
does not begin with the run's token is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

PATIENCE = 3.0
"""Seconds to wait for a connection."""

LONGEST = 1 << 12
"""Longest first message, in B."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux

Said = dict[str, Any]


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host, local ones last."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def connect(to: Sequence[str], port: int, token: str, host: int) -> Link | None:
    """Connect to the process of the first host by the first address that answers."""
    for address in to:
        with contextlib.suppress(OSError):
            link = Link(socket.create_connection((address, port), PATIENCE), 0)
            link.tell({"token": token, "host": host})
            return link
    return None


class Link:
    """A connection to the process of another host.

    Parameters
    ----------
    connection : socket
    host : int
        The other host; -1 if it has not sent its token yet.
    """

    def __init__(self, connection: socket.socket, host: int = -1) -> None:
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._begun = b""
        self.host = host
        self.closed = False

    def fileno(self) -> int:
        """Return the number of the socket."""
        return self._socket.fileno()

    def tell(self, said: Said) -> bool:
        """Send a message; return whether the connection is open."""
        try:
            self._socket.sendall(json.dumps(said).encode() + b"\n")
        except OSError:
            self.closed = True
        return not self.closed

    def heard(self) -> list[Said]:
        """Return the messages that have arrived; to be called if the socket is readable."""
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        *lines, self._begun = (self._begun + data).split(b"\n")
        try:
            said = [json.loads(line) for line in lines]
        except ValueError:
            said = [None]
        if not all(isinstance(one, dict) for one in said) or (
            self.host < 0 and len(self._begun) > LONGEST
        ):  # not one of ours
            self.close()
            return []
        return said

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()

"""Messages between hosts, over sockets of this one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pydtnn.comm.monitor.links import Link, addresses, connect


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_messages_arrive_whole_and_in_order(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    first = connect(["127.0.0.1"], port, "token", 4)
    assert first is not None
    second = Link(listener.accept()[0])
    for number in range(3):
        assert first.tell({"number": number, "text": "é" * 3000})
    heard: list[dict[str, object]] = []
    while len(heard) < 4:
        heard += second.heard()
    assert heard[0] == {"token": "token", "host": 4}
    assert [said["number"] for said in heard[1:]] == [0, 1, 2]
    first.close()
    assert second.heard() == []
    assert second.closed
    second.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\n", b"5\n", b"x" * 5000])
def test_what_is_no_message_closes_the_connection(listener: socket.socket, said: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        link = Link(listener.accept()[0])
        stranger.sendall(said)
        while not link.closed:
            assert link.heard() == []
        assert link.closed


def test_a_host_that_does_not_answer_is_not_connected_to(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert connect(["127.0.0.1"], port, "token", 1) is None


def test_addresses_of_this_host_end_with_local_ones() -> None:
    found = addresses()
    local = [address.startswith("127.") for address in found]
    assert local == sorted(local)

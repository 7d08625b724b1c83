"""Messages between hosts, over sockets of this one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from pydtnn.comm.monitor.links import (
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    HostLink,
    Message,
    addresses,
    connect,
    line,
    listen,
    parse,
)
from tests.each import each

TOKEN = "a" * 32 + "b" * 32
FIRST_HALF = TOKEN[:32].encode()
SAID = ("signal", [4, 15])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_messages_arrive_whole_and_in_order(listener):
    first = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 4)
    assert first is not None
    second = HostLink(listener.accept()[0], TOKEN)
    sent = [("rows", [number, [[]], "é" * 3000]) for number in range(3)]
    assert all(first.send(name, *facts) for name, facts in sent)
    heard: list[Message] = []
    while len(heard) < 3:
        heard += second.receive()
    assert heard == sent
    assert (second.known, second.host) == (True, 4)
    assert not first.known
    second.greet()
    assert second.send(SAID[0], *SAID[1])
    while not (answer := first.receive()):
        pass
    assert answer == [SAID]
    assert first.known
    first.close()
    assert second.receive() == []
    assert second.closed
    second.close()


@each(
    "message",
    [
        b"x" * MAX_GREETING_BYTES,
        b"\n",
        TOKEN.encode() + b" 4\n",
        *(FIRST_HALF + number for number in (b"\n", b" -1\n", b" \xb2\n", b" 99999999999\n")),
        TOKEN[32:].encode() + b"x 4\n",
        b"\xff\xfe\n" + FIRST_HALF + b" 4\n",
    ],
)
def test_a_connection_that_does_not_begin_with_the_token_is_closed(listener, message):
    with socket.create_connection(listener.getsockname()) as stranger:
        link = HostLink(listener.accept()[0], TOKEN)
        stranger.sendall(message)
        while not link.closed:
            assert link.receive() == []
        assert not link.known


def test_the_process_that_connects_also_requires_the_token(listener):
    link = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 4)
    assert link is not None
    with listener.accept()[0] as impostor:
        impostor.sendall(b"a" * 32 + b" 0\n" + line("end", 0))
        while not link.closed:
            assert link.receive() == []


def test_a_message_that_is_too_long_closes_the_connection(listener, monkeypatch):
    monkeypatch.setattr("pydtnn.comm.monitor.links.MAX_MESSAGE_BYTES", 1 << 18)
    assert MAX_MESSAGE_BYTES > 1 << 18
    first = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 4)
    assert first is not None
    second = HostLink(listener.accept()[0], TOKEN)
    first.socket.setblocking(False)
    while not second.closed:
        first.socket.send(b"[" * 1000)
        assert second.receive() == []
    first.close()


@each(
    "message",
    [
        *(b"", b"[" * 60_000, b"\xff", b"1" * 5000, b'{"a":' * 9000),
        *({}, [], 5, {"signal": 1}, [["signal"], 4, 15], ["nothing"], ["nothing", 4, 15]),
        *(["signal", 4, *bad] for bad in ([], ["15"], [True], [1 << 31], [-2], [None], [15, 1])),
        *(["signal", 1.0, 15], ["begun", 1, -2], ["end", "0"], ["answer", 1, "stacks"]),
        *(["rows", 3, {}, ""], ["rows", 3, [], None], ["rows", None, [], ""]),
    ],
)
def test_what_has_other_entries_or_is_no_json_is_no_message(message):
    assert parse(message if isinstance(message, bytes) else json.dumps(message).encode()) is None
    for right in (SAID, ("rows", [3, [], ""]), ("left", [])):
        assert parse(line(right[0], *right[1])) == right


def test_a_host_that_does_not_answer_is_not_connected_to(listener):
    port = listener.getsockname()[1]
    listener.close()
    assert connect("127.0.0.1", port, TOKEN, 1) is None


def test_other_hosts_connect_to_the_interface_that_leads_to_them():
    own = addresses()
    assert not any(address.startswith("127.") for address in own)
    with listen(own, [own]) or socket.socket() as here:  # another host, which is this one
        assert here.getsockname()[0] == "127.0.0.1"
    if own:
        with listen([], [own[:1]]) or socket.socket() as there:
            assert there.getsockname()[0] == own[0]
    assert listen([], [["no address"]]) is None

"""The monitor process of the first host: no message ends it or has it report what is not so."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any
from unittest.mock import Mock

import pytest

from pydtnn.comm.monitor import monitor as module
from pydtnn.comm.monitor.links import LOST_STATUS, MESSAGES, HostLink, connect, line
from pydtnn.comm.monitor.monitor import LATE_S, MAX_UNKNOWN_CONNECTIONS, HostMonitor
from pydtnn.comm.monitor.processes import Condition
from pydtnn.comm.monitor.ranks import EndReport, Kills, RankConnection
from pydtnn.comm.monitor.slots import CALLING, NAMES, SLOT, SURVIVES, Facts, Slot
from pydtnn.comm.monitor.table import RankRow
from tests.each import each

TOKEN = "a" * 32 + "b" * 32
HOSTS = [0, 0, 2, 3]
NOW = 0.0, 0.0
TOLD = ("answer", "finished", "freeze", "last")
"""What a rank may be told because of any message."""


class Host:
    """A monitor of ranks 0 and 1, driven by events, and what it has done.

    Attributes
    ----------
    ended : list of int
        Statuses with which it would have ended all ranks.
    printed : list of str
    lines : list of list
        Messages sent to rank 0.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ended: list[int] = []
        self.printed: list[str] = []
        patch.setattr(module, "SAME_REQUEST_S", 0.0)
        patch.setattr(module, "ANSWER_TIMEOUT_S", dict.fromkeys(("stacks", "flight"), NOW))
        patch.setattr(module, "_write", self.printed.append)
        self.memory = memoryview(bytearray(2 * SLOT))
        self.slots = [Slot(self.memory, place) for place in range(2)]
        for rank, slot in enumerate(self.slots):
            slot.clear(rank, 300.0)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        facts = Facts(HOSTS, 0, {"0": "a", "2": "b", "3": "c"}, "127.0.0.1", self.port, TOKEN)
        self.poll = select.epoll()
        self.rank, joined = socket.socketpair()
        self.rank.setblocking(False)
        self.connection = RankConnection(joined)
        self.connection.rank = 0
        connections = {joined.fileno(): self.connection}
        end_report = EndReport(-1, 0, Kills(), all_here=False)
        patch.setattr(end_report, "claim", lambda: True)
        patch.setattr(EndReport, "claimed", False)
        self.monitor = HostMonitor(
            facts, self.slots, end_report, self.poll, connections, self.listener
        )
        patch.setattr(self.monitor, "_end_all", self.ended.append)

    @property
    def lines(self) -> list[Any]:
        try:
            return [json.loads(text) for text in self.rank.recv(1 << 20).splitlines()]
        except BlockingIOError:
            return []

    def run(self) -> None:
        """Handle all events that have occurred."""
        while events := self.poll.poll(0):
            for number, _ in events:
                self.monitor.event(number)

    def connect(self, host: int) -> socket.socket:
        """Connect as another host, with the token."""
        link = connect("127.0.0.1", self.port, TOKEN, host)
        assert link is not None
        self.run()
        assert link.socket.recv(1 << 10) == TOKEN[32:].encode() + b" 0\n"
        return link.socket

    def close(self) -> None:
        for link in [*self.monitor._links.values()]:
            link.close()
        self.poll.close()
        for one in (self.listener, self.rank, self.connection.socket):
            one.close()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host(monkeypatch)
    yield host
    host.close()


def check_works(host: Host) -> None:
    """Check that a table is right, and that a wait that lasts too long ends the run."""
    assert host.ended == []
    assert not any(text.startswith("no progress") for text in host.printed)
    host.printed.clear()
    host.monitor.heard(0, "table")
    assert re.search(r"^0-1  +a  +- .*outside of training\n2  +b .*\n3 ", host.printed[0], re.M)
    for slot in host.slots:
        slot.limit(1e-3)
        slot.words[CALLING] = 1
    for _ in range(5):
        time.sleep(0.002)
        host.monitor.look()
    assert host.ended[:1] == [module.TIMEOUT_STATUS]
    assert host.printed[1].startswith("no progress for 0.001 s (--timeout): ")


ODD: list[Any] = [
    *(None, True, -1, 10**400, -(1 << 63), 1e308, float("nan"), float("inf")),
    *("", "freeze", "last", "\x1b[2J", "\u2028", "a" * 300),
    *([], [1, 2, 15], [["x"]], {}, {"what": [{}]}, ["end", 0], ["last", 3, 15, 1]),
]
"""JSON values; large numbers and texts with odd characters among them."""


def valid(random_: random.Random) -> list[Any]:
    """Return a message with entries of the right types."""
    name = random_.choice(sorted(MESSAGES.keys() - {"failed", "rows"}))
    if random_.random() < 0.2:
        rows = [astuple(RankRow(random_.randrange(4), "b", seconds=1e300)) for _ in range(2)]
        return ["rows", random_.randrange(9), rows, "x"]
    return [name, *("stacks" if one is str else random_.randrange(-1, 9) for one in MESSAGES[name])]


def random_line(random_: random.Random) -> bytes:
    """Return a line that is no message, or one with any of its entries changed or missing."""
    kind, message = random_.randrange(5), valid(random_)
    if kind == 0:
        return random_.randbytes(random_.randrange(200)).replace(b"\n", b"")
    if kind == 1:
        return random_.choice([b"[", b'{"a":', b"1", b'"\\u', b"-"]) * random_.randrange(9000)
    if kind == 2:
        message[random_.randrange(len(message))] = random_.choice(ODD)
    if kind == 3:
        del message[random_.randrange(len(message))]
    return json.dumps(random_.choice(ODD) if random_.random() < 0.1 else message).encode()


@pytest.mark.parametrize(
    "count",
    [400, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.matrix])],
)
def test_no_message_ends_the_monitor_or_a_run(host, count):
    random_ = random.Random(count)
    known = host.connect(2)
    for number in range(count // 2):  # with the token
        if number % 100 == 99:  # a host that connects again
            known.close()
            host.run()
            known = host.connect(2)
        known.sendall(random_line(random_) + b"\n")
        host.run()
        assert {message[0] for message in host.lines} <= {*TOLD}
        if random_.random() < 0.05:
            name = random_.choice(["table", "signal", "begun", "finish", "flight", "expired"])
            host.monitor.heard(random_.randrange(-1, 5), name, random_.randrange(-1, 99))
        if random_.random() < 0.05:
            host.monitor.look()
    for number in range(count - count // 2):  # without
        with socket.create_connection(("127.0.0.1", host.port)) as stranger:
            stranger.sendall(random_line(random_)[:4000] + b"\n" * (number % 2))
            host.run()
    known.close()
    host.run()
    check_works(host)


def test_connections_without_the_token_are_few(host, monkeypatch):
    with contextlib.ExitStack() as strangers:
        for _ in range(2 * MAX_UNKNOWN_CONNECTIONS):
            strangers.enter_context(socket.create_connection(("127.0.0.1", host.port)))
            host.run()
        assert len(host.monitor._links) == MAX_UNKNOWN_CONNECTIONS
        host.connect(3).close()
        host.run()
        # No further file can be opened: nothing is accepted, and no rank is said to have ended.
        strangers.enter_context(socket.create_connection(("127.0.0.1", host.port)))
        monkeypatch.setattr(socket.socket, "accept", Mock(side_effect=OSError(errno.EMFILE, "")))
        host.monitor.event(host.listener.fileno())
        assert host.monitor._links == {}
        host.monitor.heard(0, "table")
        assert "has ended" not in host.printed[-1].partition("cannot be asked")[0]


def test_a_host_is_what_it_says_only_once(host):
    first = host.connect(2)
    for number in (2, 0, 1, 7):
        with socket.create_connection(("127.0.0.1", host.port)) as second:
            second.sendall(TOKEN[:32].encode() + f" {number}\n".encode())
            host.run()
            assert second.recv(10) == b""
    first.sendall(line("begun", 3, 4))  # not a rank of this host
    host.monitor.heard(0, "signal", 15)
    host.run()
    assert host.lines == [["freeze"], ["last", -1, 15, 0]]  # host 3 is missing
    first.close()


def test_processes_of_all_hosts_learn_that_a_rank_has_exited(host):
    other = host.connect(3)
    other.sendall(line("exited", 3, {"all": 7}))
    host.run()
    host.connection.messages.append(("exited", [0, {"all": 8}]))
    host.monitor._read_rank(host.connection)
    assert host.monitor._exited == {3: {"all": 7}, 0: {"all": 8}}
    other.settimeout(300)
    told = b""
    while told.count(b"\n") < 2:
        told += other.recv(1 << 10)
    assert line("exited", 0, {"all": 8}) in told
    other.close()


@pytest.mark.parametrize(
    ("number", "peer", "seconds", "calls", "ends"),
    [
        (3, -1, 0.5, {"all": 2}, True),
        (3, -1, 0.0, {"all": 2}, False),  # another call may have begun meanwhile
        (3, -1, 9.0, {"all": 3}, False),  # it has made that call
        (3, -1, 9.0, {"all": None}, False),
        (1, -1, 9.0, {"other": 2}, False),  # it is no member
        (0, 3, LATE_S, {}, True),
        (0, 3, LATE_S / 4, {}, False),  # a message may be on its way
        (0, 2, 9.0, {}, False),
        (0, -1, 9.0, {"all": 2}, False),  # of any rank
    ],
)
def test_a_wait_for_a_rank_that_has_exited_ends_the_run(host, number, peer, seconds, calls, ends):
    row = RankRow(0, "a", seconds=seconds, waits="barrier", group="all", number=number, peer=peer)
    host.monitor._watched.look = lambda now: [row]  # type: ignore[method-assign]
    host.monitor._exit(3, calls)
    host.monitor.look()
    host.monitor.look()
    assert host.ended == [1] * ends
    text = "rank 0: waits in barrier for rank 3, whose program has ended; all ranks must make the"
    assert [one.startswith(text) for one in host.printed] == [True] * ends


def test_the_stacks_of_ranks_on_other_hosts_are_in_the_table_on_request(host, monkeypatch):
    monkeypatch.setitem(module.ANSWER_TIMEOUT_S, "stacks", (0.0, 60.0))
    host.slots[0].show(1, "  MainThread: here\n")
    others = {number: host.connect(number) for number in (2, 3)}
    for number, other in others.items():  # the answers to the first request
        rows = [astuple(RankRow(number, "b"))]
        other.sendall(line("table", number, 0))  # asks for what it is about to be part of
        other.sendall(line("rows", 1, rows, f"stack of rank {number}:\n"))
    host.monitor.heard(0, "table")
    assert len(host.printed) == 1
    stacks = "stack of rank 0:\n  MainThread: here\nno stack of rank 1\n"
    assert host.printed[0].endswith(f"{stacks}stack of rank 2:\nstack of rank 3:\n")
    for other in others.values():
        assert json.loads(other.recv(99)) == ["answer", "stacks", 1]
        other.close()
    # and what this host answers to the first one
    ours, first = socket.socketpair()
    host.slots[0].show(2, "  MainThread: here\n")
    with contextlib.closing(HostLink(ours, TOKEN, 0)) as link, first:
        host.monitor._first = link
        host.monitor._hear(link, ("answer", ["stacks", 7]))
        name, request, rows, texts = json.loads(first.recv(1 << 16))
    assert (name, request, texts) == ("rows", 7, stacks)
    assert [row[0] for row in rows] == [0, 1]


def test_ranks_that_survive_are_recorded_when_others_have_had_time_to_fail(host, monkeypatch):
    recorded: list[str] = []
    monkeypatch.setattr(host.monitor, "_record", lambda why, rows: recorded.append(why))
    host.monitor._later = 5.0, [], "rank 3 has failed"
    for now, reasons in ((4.0, []), (6.0, ["rank 3 has failed"]), (7.0, ["rank 3 has failed"])):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        host.monitor.look()
        assert recorded == reasons


def test_ranks_that_remain_after_an_error_have_a_deadline(host, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for seconds in (0, 10_000, 0, 300, 1):  # without an error, they may take any time
        assert not host.ended
        now += seconds
        host.monitor.look()
        monkeypatch.setattr(EndReport, "claimed", now > 10_000)
    assert host.ended == [1]
    assert host.printed == ["rank 0: not ended 300 s (--timeout) after the error; killed\n"]


def test_a_rank_that_is_late_is_excluded_once_and_then_the_others_end(host, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("pydtnn.comm.monitor.table.condition_of", lambda pid: Condition())
    for slot in host.slots:
        slot.words[SURVIVES] = 1
        slot.limit(10.0)
    host.slots[0].words[CALLING] = 1
    for other in (2, 3):
        host.monitor._lost |= {other}
    for _ in range(100):
        now += 0.5
        host.monitor.look()
        if host.ended:
            break
    texts = [text for text in host.printed if "no progress" in text]
    assert texts[0].endswith("; rank 1 is excluded\n")
    assert "\nrank  epoch  step " in texts[1]
    assert host.ended[0] == module.TIMEOUT_STATUS


@each(
    ("name", "number", "told", "printed", "lost", "ended"),
    [
        ("table", 0, [["answer", "stacks", 1]], 1, [], []),
        ("expired", 0, [["answer", "stacks", 2]], 0, [], []),  # meanwhile no wait is late
        ("signal", signal.SIGUSR1, [["freeze"], ["last", -1, 10, 1]], 0, [], []),
        ("signal", signal.SIGHUP, [], 0, [], []),
        ("begun", 3, [], 0, [], []),
        ("flight", 0, [["finished"]], 0, [], []),
        ("failed", 0, [], 0, [1], []),
        ("failed", 1, [], 0, [], [LOST_STATUS]),
    ],
)
def test_a_message_of_a_rank_does_one_thing(host, name, number, told, printed, lost, ended):
    host.monitor.heard(1, name, number)
    assert host.lines == told
    assert (len(host.printed), host.monitor._lost, host.ended) == (printed, {*lost}, ended)
    host.printed.clear()
    host.monitor._lost.clear()


def test_a_rank_is_there_until_it_has_closed_its_connection():
    own, other = socket.socketpair()
    rank: Any = Mock(socket=own)
    with own:
        assert module._is_open(rank)
        other.send(b"x")  # its last message, which is not read yet
        assert module._is_open(rank)
        own.recv(1)
        other.close()
        assert not module._is_open(rank)


def test_memory_with_any_content_ends_no_monitor(host):
    random_ = random.Random(1)
    for _ in range(300):
        host.memory[:NAMES] = random_.randbytes(NAMES)
        host.memory[SLOT - (1 << 14) :][:64] = random_.randbytes(64)
        host.monitor._local("stacks")
        host.monitor.heard(0, "table")
    assert host.ended == []

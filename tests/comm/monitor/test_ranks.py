"""Which rank has ended first, what is known of its end, and who tells it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pydtnn.comm.monitor.links import is_first, line
from pydtnn.comm.monitor.monitor import HostMonitor
from pydtnn.comm.monitor.ranks import EndedEarlyError, Kills, RankConnection, accept_ranks, explain
from pydtnn.comm.monitor.slots import SLOT, Facts, Slot
from tests.each import each


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        yield listener


@pytest.fixture
def connect(listener: socket.socket) -> Callable[[int], socket.socket]:
    def connect(rank: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(listener.getsockname())
        connection.sendall(line("rank", rank))
        return connection

    return connect


class Ended(Exception):
    """The monitor has ended all ranks."""


def first_to_end(listener: socket.socket, ranks: int) -> list[int]:
    """Watch the ranks of one host until one has ended unexpectedly."""
    failed: list[int] = []

    def report(rank: int) -> None:
        failed.append(rank)
        raise Ended

    idle = SimpleNamespace(remember=lambda seconds: None)
    ends = SimpleNamespace(claimed=False, kills=idle, report=report)
    with contextlib.ExitStack() as stack, contextlib.suppress(Ended), select.epoll() as poll:
        connections = accept_ranks(listener, ranks, poll)
        for one in connections.values():
            stack.enter_context(one.socket)
        memory = memoryview(bytearray(ranks * SLOT))
        slots = [Slot(memory, place) for place in range(ranks)]
        HostMonitor(Facts([0] * ranks, 0, {"0": "a"}), slots, ends, poll, connections).run()  # type: ignore[arg-type]
    return failed


@each("answers", [False, True])
def test_the_order_of_ends_is_known_as_soon_as_ranks_receive_that_they_are_watched(
    listener, connect, monkeypatch, answers
):
    """Also where one of them has just sent a message."""
    ranks, sent = [connect(rank) for rank in range(3)], []
    read, send = RankConnection.read, RankConnection.send

    def close() -> None:
        for rank in (1, 2, 0):
            ranks[rank].close()

    def send_and_close(self: RankConnection, name: str) -> None:
        send(self, name)
        sent.append(name)
        if answers and self.rank == 2:
            ranks[2].sendall(b"a message\n")
        if not answers and len(sent) == len(ranks):
            close()

    def read_and_close(self: RankConnection, poll: select.epoll) -> None:
        answered = self.rank == 2  # known since its first message
        read(self, poll)
        if answered:
            close()

    monkeypatch.setattr(RankConnection, "send", send_and_close)
    monkeypatch.setattr(RankConnection, "read", read_and_close)
    assert first_to_end(listener, len(ranks)) == [1]
    assert sent == ["ready"] * 3


def test_kills_for_lack_of_memory_count_for_a_while(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 7\noom_kill 3\noom_killer 9\n")
    kills = Kills(str(counters))
    assert not kills.recent()
    counters.write_text("oom_kill 4\n")
    kills.remember()
    assert kills.recent()
    kills.remember()
    assert not kills.recent()
    assert not Kills(str(tmp_path / "nowhere")).recent()


def test_without_the_rank_that_has_started_it_the_process_ends(listener):
    """Otherwise it would wait for that rank, and the launcher for the end of its output."""
    own, other = socket.socketpair()
    with own, select.epoll() as poll:
        other.close()
        with pytest.raises(EndedEarlyError):
            accept_ranks(listener, 2, poll, starter=own.fileno())


def test_what_is_known_of_an_end_is_told():
    for all_here in (True, False):
        assert "the out-of-memory killer has just killed" in str(explain(2, True, all_here))
    assert explain(2, False, False) is None  # on several hosts
    assert explain(2, False, True) == (
        "rank 2: terminated unexpectedly; it crashed, was killed or called os._exit"
    )


@each("error", [0, errno.ENOSPC, errno.EFBIG])
def test_of_all_who_open_a_file_one_is_first_and_each_where_it_cannot_grow(
    error, tmp_path, monkeypatch
):
    def write(file: int, data: bytes) -> int:
        raise OSError(error, os.strerror(error))

    (tmp_path / "slots").write_bytes(b"123")
    files = [os.open(tmp_path / "slots", os.O_WRONLY | os.O_APPEND) for _ in range(3)]
    if error:
        monkeypatch.setattr(os, "write", write)
    assert [is_first(file, 3) for file in files] == [True, bool(error), bool(error)]
    for file in files:
        os.close(file)

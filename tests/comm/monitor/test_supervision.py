"""A rank and its monitor process: their messages, and the loss of the process."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pydtnn.comm.monitor import supervision as module
from pydtnn.comm.monitor.links import MessageSocket, line
from pydtnn.comm.monitor.slots import SLOT, Slot
from pydtnn.comm.monitor.supervision import Supervision
from tests.ranks import wait_for


class Rank:
    """Rank 0 of two on a host, and its end of the connection.

    Attributes
    ----------
    ends : list of (int, str)
        The statuses and reasons with which it would have ended all ranks.
    """

    def __init__(self, connected: bool = True) -> None:
        memory = memoryview(bytearray(2 * SLOT))
        self.slots = [Slot(memory, place) for place in range(2)]
        for rank, slot in enumerate(self.slots):
            slot.clear(rank, 300.0)
        self.ends: list[tuple[int, str]] = []
        self.monitor, own = socket.socketpair()
        self._own = own
        self.supervision = Supervision(
            self.slots, 0, "here", MessageSocket(own) if connected else None
        )
        self.supervision.connect(
            lambda code, reason: self.ends.append((code, reason)),
            lambda number: None,
        )

    def close(self) -> None:
        self.supervision.leave()
        self.monitor.close()
        time.sleep(3 * module.INTERVAL_S)
        self._own.close()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "LOST_S", 0.05)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


LOSS = (
    "warning: the monitor process of here {}: waits have no deadline, and a signal ends the run at "
    "once, without a checkpoint\n"
)


def test_the_loss_of_the_monitor_is_reported_once_and_the_run_goes_on(rank, capfd, tmp_path):
    rank.supervision.last_step.start()
    rank.monitor.close()
    told: list[str] = []
    wait_for(lambda: told.append(capfd.readouterr().err) or "".join(told))
    assert "".join(told) == LOSS.format("has ended")
    assert rank.ends == []
    assert not rank.supervision.last_step.request(signal.SIGTERM)  # nothing would answer
    rank.supervision.folder = str(tmp_path / "flight")
    rank.supervision.request_table()
    assert capfd.readouterr().err.startswith("stack of rank 0:\n  MainThread: ")
    assert [*(tmp_path / "flight").iterdir()]


def test_the_stack_of_a_main_thread_that_waits_for_another_thread_is_shown():
    main = threading.main_thread().ident or 0

    def look() -> str:
        wait_for(lambda: sys._current_frames()[main].f_code.co_filename == threading.__file__)
        return module.stacks()

    with ThreadPoolExecutor(1) as pool:
        assert re.search(r"^  MainThread: .*that_waits", pool.submit(look).result(), re.M)


def test_a_run_without_a_monitor_is_announced_and_ends_at_once_by_a_signal(capfd):
    with contextlib.closing(Rank(connected=False)) as rank:
        rank.supervision.last_step.start()
        assert not rank.supervision.last_step.request(signal.SIGTERM)  # nothing is asked
    assert capfd.readouterr().err == LOSS.format("cannot be started")


def test_a_rank_that_leaves_is_not_warned(rank, capfd):
    rank.supervision.leave()
    rank.monitor.close()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_a_folder_of_flight_records_is_absolute(rank, tmp_path):
    with contextlib.chdir(tmp_path):
        rank.supervision.folder = "flight"  # type: ignore[assignment]
    assert rank.slots[0].folder == str(tmp_path / "flight")
    rank.supervision.folder = ""  # type: ignore[assignment]
    assert rank.slots[0].folder == ""


def test_what_is_no_message_is_ignored(rank):
    lines = b'\n\n["end"]\nend 1\n["answer", 1]\n["last", 1, 2]\n\xff 1\n[]\n["end", 1e3]\n'
    rank.monitor.sendall(lines + line("end", 7))
    wait_for(lambda: rank.ends)
    assert rank.ends == [(7, "")]

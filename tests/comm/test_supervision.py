"""A rank without the monitor process: it warns, and watches its own waits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pydtnn.comm import supervision as module
from pydtnn.comm.monitor.links import MessageSocket, line
from pydtnn.comm.monitor.monitor import TIMEOUT_STATUS
from pydtnn.comm.monitor.processes import Condition
from pydtnn.comm.monitor.slots import MONITOR, SLOT, Slot
from pydtnn.comm.supervision import Supervision
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
    silence = {"has ended": 0.05, "stopped": 0.1, "": 0.3}
    monkeypatch.setattr(module, "MAX_SILENCE_S", silence)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def check_deadline(rank: Rank) -> None:
    """Check that a wait that is too long ends all ranks, with the table of the host."""
    assert rank.ends == []
    rank.supervision.activity.call("allreduce", "all", 1, -1)
    rank.supervision.limit(0.05)
    wait_for(lambda: rank.ends)
    ((code, reason),) = rank.ends
    assert code == TIMEOUT_STATUS
    assert reason.startswith(
        "no progress for 0.05 s (--timeout): rank 1: outside of training since "
    )
    assert "; rank 0 waits in allreduce\nrank  epoch  step " in reason
    assert "\nstack of rank 0:\n  MainThread: " in reason


def test_the_end_of_the_monitor_is_told_once(rank, capfd):
    rank.supervision.last_step.start()
    rank.monitor.close()
    check_deadline(rank)
    told = capfd.readouterr().err
    assert told.startswith("warning: the monitor process of here has ended: from now on each rank ")
    assert told.count("\n") == 1
    assert not rank.supervision.last_step.request(signal.SIGTERM)  # nobody would answer


def test_a_rank_that_waits_for_a_disk_tells_it(rank, monkeypatch, capfd):
    """Otherwise the others, which have the same rule, would tell it, too."""
    condition = Condition("waits for a disk or a file system")
    monkeypatch.setattr(rank.supervision._watched, "_condition", lambda pid: condition)
    rank.monitor.close()
    wait_for(lambda: "warning: " in capfd.readouterr().err)


def test_a_monitor_that_is_stopped_is_told_once(rank, capfd):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as monitor:
        rank.slots[0].words[MONITOR] = monitor.pid
        os.kill(monitor.pid, signal.SIGSTOP)
        wait_for(
            lambda: capfd.readouterr().err.count("here is stopped by a signal (SIGSTOP): "), 10
        )
        check_deadline(rank)
        assert capfd.readouterr().err == ""
        monitor.kill()


def test_a_monitor_that_looks_at_the_slot_is_not_lost(rank, capfd):
    rank.supervision.activity.call("allreduce", "all", 1, -1)
    rank.supervision.limit(0.05)
    for _ in range(80):
        rank.slots[0].beat()
        time.sleep(0.005)
    assert (rank.ends, capfd.readouterr().err) == ([], "")


def test_the_stack_of_a_main_thread_that_waits_for_another_thread_is_shown():
    main = threading.main_thread().ident or 0

    def look() -> str:
        wait_for(lambda: sys._current_frames()[main].f_code.co_filename == threading.__file__)
        return module.stacks()

    with ThreadPoolExecutor(1) as pool:
        assert re.search(r"^  MainThread: .*that_waits", pool.submit(look).result(), re.M)


def test_where_there_is_no_monitor_deadlines_are_kept(capfd):
    with contextlib.closing(Rank(connected=False)) as rank:
        rank.supervision.last_step.start()
        assert not rank.supervision.last_step.request(signal.SIGTERM)  # nobody is asked
        check_deadline(rank)
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

"""A rank that terminates unexpectedly is told of by another process, and only such a rank."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pydtnn.comm import failure, mpi
from pydtnn.comm.monitor.monitor import Facts, Monitor
from pydtnn.comm.monitor.ranks import (
    READY,
    EndedEarlyError,
    Kills,
    RankConnection,
    accept_ranks,
    explain,
    is_first,
)
from pydtnn.comm.monitor.slots import SLOT, Slot
from tests.ahead import mpiexec
from tests.each import each
from tests.launch import Finished, Program, is_openmpi, why_not
from tests.ranks import wait_for
from tests.small_run import only_line, processes_in

START = """
import os, signal, time
import numpy as np
from pydtnn.comm import create_communicator
comm = create_communicator()
"""
MPICH_ONLY: Any = {
    "condition": bool(why_not()) or is_openmpi(),
    "reason": why_not() or "Open MPI's launcher ends the others, and forwards signals",
}
WAIT = "\ncomm.recv(np.zeros(1), comm.rank)\n"  # from oneself: for ever


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
        connection.sendall(b"%d\n" % rank)
        return connection

    return connect


class Ended(Exception):
    """The monitor has ended all ranks."""


class Watching:
    """The monitor of the ranks of one host, in this process.

    Attributes
    ----------
    failed : list of int
        The rank that has ended unexpectedly.
    """

    claimed = False

    def __init__(self) -> None:
        self.failed: list[int] = []

    def watch(self, listener: socket.socket, ranks: int) -> list[int]:
        """Watch the ranks until they have ended; return those that have failed."""
        with contextlib.ExitStack() as stack, contextlib.suppress(Ended), select.epoll() as poll:
            connections = accept_ranks(listener, ranks, poll)
            for one in connections.values():
                stack.enter_context(one.socket)
            memory = memoryview(bytearray(ranks * SLOT))
            slots = [Slot(memory, place) for place in range(ranks)]
            monitor = Monitor(Facts([0] * ranks, 0, {"0": "a"}), slots, self, poll, connections)  # type: ignore[arg-type]
            monitor.run()
        return self.failed

    @property
    def kills(self) -> Watching:
        return self

    def remember(self, seconds: float) -> None:
        """Called when it has nothing to do."""

    def report(self, rank: int) -> bool:
        self.failed.append(rank)
        raise Ended


def test_the_order_of_ends_is_known_as_soon_as_ranks_receive_that_they_are_watched(
    listener: socket.socket,
    connect: Callable[[int], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, sent = [connect(rank) for rank in range(3)], []
    send = RankConnection.send

    def send_and_close(self: RankConnection, data: bytes) -> None:
        send(self, data)
        sent.append(data)
        if len(sent) == len(ranks):
            for rank in (2, 0, 1):
                ranks[rank].close()

    monkeypatch.setattr(RankConnection, "send", send_and_close)
    assert Watching().watch(listener, len(ranks)) == [2]
    assert sent == [READY] * 3


def test_the_end_of_a_rank_that_has_just_sent_a_message_does_not_precede_earlier_ones(
    listener: socket.socket,
    connect: Callable[[int], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [connect(rank) for rank in range(3)]
    receive, send = RankConnection.receive, RankConnection.send

    def send_and_answer(self: RankConnection, data: bytes) -> None:
        send(self, data)
        if self.rank == 2:
            ranks[2].sendall(b"a message\n")

    def receive_and_close(self: RankConnection, poll: select.epoll) -> None:
        answered = self.rank == 2  # known since its first message
        receive(self, poll)
        if answered:
            for rank in (1, 2, 0):
                ranks[rank].close()

    monkeypatch.setattr(RankConnection, "send", send_and_answer)
    monkeypatch.setattr(RankConnection, "receive", receive_and_close)
    assert Watching().watch(listener, len(ranks)) == [1]


def test_kills_for_lack_of_memory_count_for_a_while(tmp_path: Path) -> None:
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


def test_without_the_rank_that_has_started_it_the_process_ends(listener: socket.socket) -> None:
    """Otherwise it would wait for that rank, and the launcher for the end of its output."""
    own, other = socket.socketpair()
    with own, select.epoll() as poll:
        other.close()
        with pytest.raises(EndedEarlyError):
            accept_ranks(listener, 2, poll, starter=own.fileno())


def test_what_is_known_of_an_end_is_told() -> None:
    for all_here in (True, False):
        assert "the out-of-memory killer has just killed" in str(explain(2, True, all_here))
    assert explain(2, False, False) is None  # on several hosts
    assert explain(2, False, True) == (
        "rank 2: terminated unexpectedly; it crashed, was killed or called os._exit"
    )


@each("error", [0, errno.ENOSPC, errno.EFBIG])
def test_of_all_who_open_a_file_one_is_first_and_each_where_it_cannot_grow(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes) -> int:
        raise OSError(error, os.strerror(error))

    (tmp_path / "slots").write_bytes(b"123")
    files = [os.open(tmp_path / "slots", os.O_WRONLY | os.O_APPEND) for _ in range(3)]
    if error:
        monkeypatch.setattr(os, "write", write)
    assert [is_first(file, 3) for file in files] == [True, bool(error), bool(error)]
    for file in files:
        os.close(file)


@pytest.mark.few(1)
@pytest.mark.ahead(call=lambda body: mpiexec(3, ["-c", START + body], timeout=60))
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if comm.rank == 2: os._exit(0)" + WAIT, "rank 2: terminated unexpectedly; "),
        (
            "again = create_communicator()\n"
            "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)" + WAIT,
            "rank 1: terminated unexpectedly; it crashed, was killed or called os._exit",
        ),
        ("time.sleep(0.1 * comm.rank)", None),
        ("if comm.rank == 1: raise SystemExit(1)", None),
    ],
    ids=["left", "killed with two communicators", "in order", "by sys.exit"],
)
def test_an_end_without_a_word_is_told_once(ahead: Finished, body: str, line: str | None) -> None:
    told = [text for text in ahead.stderr.splitlines() if text.startswith("rank ")]
    assert len(told) == (line is not None)
    assert all(text.startswith(str(line)) for text in told)
    assert (ahead.returncode == 0) == (body.startswith("time"))


AT_THE_START = """
import contextlib, os, pathlib, signal, time
from pydtnn.comm import create_communicator, failure, mpi
def parent(process):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
def is_monitor(path):
    with contextlib.suppress(OSError, ValueError, IndexError):
        named = b"monitor/process.py" in (path / "cmdline").read_bytes()
        return named and parent(parent(path.name)) == os.getppid()
OWNER, NAME = {"MPI": (mpi, "_initialise"), "slots": (failure, "_share")}[os.environ["STAGE"]]
original = getattr(OWNER, NAME)
def struck(*args):
    if os.environ["PMI_RANK"] == "1":
        while not any(map(is_monitor, pathlib.Path("/proc").glob("[0-9]*"))):
            time.sleep(0.01)
        time.sleep(1)  # until it watches, which takes a moment after its start
        exec(os.environ["ACT"])
    return original(*args)
setattr(OWNER, NAME, struck)
make = failure._make_folder
def made(ranks):
    print(folder := make(ranks), flush=True)
    return folder
failure._make_folder = made
comm = create_communicator()
"""


def ending_at_the_start(stage: str, act: str) -> Finished:
    return mpiexec(3, ["-c", AT_THE_START], timeout=60, environment={"STAGE": stage, "ACT": act})


@pytest.mark.skipif(**MPICH_ONLY)
@pytest.mark.ahead(call=ending_at_the_start)
@pytest.mark.parametrize(
    ("stage", "act"),
    [
        ("MPI", "os.kill(os.getpid(), signal.SIGKILL)"),
        ("slots", "os.kill(os.getpid(), signal.SIGKILL)"),
        pytest.param("MPI", "os._exit(0)", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_ends_before_all_have_started_is_told(
    ahead: Finished, stage: str, act: str
) -> None:
    assert ahead.returncode != 0
    # After MPI has started, its launcher kills the others so fast that one may seem to be first.
    rank = "rank 1" if stage == "MPI" else r"(rank \d|a rank)"
    why = "terminated unexpectedly; it ended before all ranks had started"
    assert re.fullmatch(f"{rank}: {why}", only_line(ahead.stderr))
    folders = [Path(word) for word in ahead.stdout.split() if "pydtnn-" in word]
    assert folders
    wait_for(lambda: not any(map(Path.exists, folders)))


@pytest.mark.skipif(**MPICH_ONLY)
@pytest.mark.ahead(call=lambda: ending_at_the_start("slots", "raise OSError('too many files')"))
def test_an_error_of_a_rank_that_joins_the_others_ends_them(ahead: Finished) -> None:
    assert ahead.returncode != 0
    assert "rank 1: too many files" in ahead.stderr
    assert "Traceback" not in ahead.stderr


@pytest.mark.skipif(**MPICH_ONLY)
def test_the_end_of_the_launcher_is_told(tmp_path: Path) -> None:
    ready = "\nprint('ready', flush=True)"
    with Program(3, ["-c", START + ready + WAIT], directory=tmp_path) as program:
        wait_for(lambda: program.finished().stdout.count("ready") == 3)
        program.signal(signal.SIGKILL)
        wait_for(lambda: not processes_in(tmp_path) and program.finished().stderr)
        line = only_line(program.finished().stderr)
    assert line.startswith("mpirun: process ")
    assert "has ended, by a signal, because its terminal was closed or " in line


KEPT = """
import atexit, os, threading, time
from pydtnn.comm import create_communicator
from pydtnn.utils.errors import AgreedError
comm = create_communicator(timeout=5)
if comm.rank == 0 and os.environ["BY"] == "thread":
    threading.Thread(target=threading.Event().wait).start()
if comm.rank == 0 and os.environ["BY"] == "exit":
    atexit.register(threading.Event().wait)
if comm.rank == 0 and os.environ["BY"] == "child" and os.fork() == 0:
    threading.Event().wait()
raise AgreedError("all have failed")
"""


def kept(by: str) -> Finished:
    return mpiexec(2, ["-c", KEPT], timeout=120, environment={"BY": by})


@pytest.mark.skipif(**MPICH_ONLY)
@pytest.mark.ahead(call=kept)
@pytest.mark.parametrize(
    "by", ["thread", *(pytest.param(by, marks=pytest.mark.long) for by in ("child", "exit"))]
)
def test_ranks_that_something_keeps_after_an_error_are_ended_after_the_deadline(
    ahead: Finished, by: str
) -> None:
    assert ahead.returncode != 0
    first, *others = [line for line in ahead.stderr.splitlines() if "rank" in line or "all" in line]
    assert first == "all have failed"
    assert re.match(r"ranks? .*: not ended 5 s \(--timeout\) after the error; killed", others[0])


LEFT = (
    START
    + r"""
import re
print(*re.findall(r"/dev/shm/mpich_shm_\w+", open("/proc/self/maps").read()), flush=True)
comm.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.skipif(**MPICH_ONLY)
@pytest.mark.ahead(call=lambda: mpiexec(2, ["-c", LEFT], timeout=120))
def test_no_file_in_memory_remains_of_ranks_that_are_killed(ahead: Finished) -> None:
    files = {Path(word) for word in ahead.stdout.split() if word.startswith("/dev/shm/mpich")}
    assert files
    wait_for(lambda: not any(file.exists() for file in files))


def test_a_folder_without_room_for_the_slots_does_not_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(failure, "_MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert failure._make_folder(2) is None
    assert not [*tmp_path.iterdir()]


@each(
    ("limit", "value", "problem"),
    [
        ("RLIMIT_NOFILE", 32, r"66 open files \(ulimit -n\) for 2 ranks, got 32"),
        ("RLIMIT_FSIZE", 1 << 20, r"5,242,880 B of a file \(ulimit -f\) for 2 ranks, got 1,048"),
        ("f_blocks", 1 << 20, "3,276,800 B in /dev/shm .* for 2 ranks, got 1,048,576"),
        ("access", 0, "a folder /dev/shm that can be written"),
    ],
)
def test_what_mpi_would_not_start_with_is_refused_before(
    limit: str, value: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH ends the process with a page of text, or its ranks wait for each other for ever."""
    memory = SimpleNamespace(f_blocks=value if limit == "f_blocks" else 0, f_frsize=1)
    limits = {getattr(resource, limit): value} if limit.startswith("R") else {}
    monkeypatch.setattr(os, "access", lambda path, mode: limit != "access")
    monkeypatch.setattr(os, "statvfs", lambda path: memory)
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2
    )
    with pytest.raises(ValueError, match=f"^mpi: MPICH 5 requires {problem}"):
        mpi._check_host("MPICH 5", 2)
    if limit != "access":
        mpi._check_host("MPICH 5", 1)

"""A rank that terminates unexpectedly is told of by another process, and only such a rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ahead import mpiexec
from tests.launch import Finished, is_openmpi, why_not
from tests.ranks import wait_for
from tests.small_run import only_line

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


@pytest.mark.few(1)
@pytest.mark.ahead(call=lambda body: mpiexec(3, ["-c", START + body]))
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
def test_an_end_without_a_word_is_told_once(ahead, body, line):
    told = [text for text in ahead.stderr.splitlines() if text.startswith("rank ")]
    assert len(told) == (line is not None)
    assert all(text.startswith(str(line)) for text in told)
    assert (ahead.returncode == 0) == (body.startswith("time"))


AT_THE_START = """
import contextlib, os, pathlib, signal, time
from pydtnn.comm import create_communicator, mpi
from pydtnn.comm.monitor import failure
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
    return mpiexec(3, ["-c", AT_THE_START], environment={"STAGE": stage, "ACT": act})


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
def test_a_rank_that_ends_before_all_have_started_is_told(ahead, stage, act):
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
def test_an_error_of_a_rank_that_joins_the_others_ends_them(ahead):
    assert ahead.returncode != 0
    assert "rank 1: too many files" in ahead.stderr
    assert "Traceback" not in ahead.stderr


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
    return mpiexec(2, ["-c", KEPT], environment={"BY": by})


@pytest.mark.skipif(**MPICH_ONLY)
@pytest.mark.ahead(call=kept)
@pytest.mark.parametrize(
    "by", ["thread", *(pytest.param(by, marks=pytest.mark.long) for by in ("child", "exit"))]
)
def test_ranks_that_something_keeps_after_an_error_are_ended_after_the_deadline(ahead, by):
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
@pytest.mark.ahead(call=lambda: mpiexec(2, ["-c", LEFT]))
def test_no_file_in_memory_remains_of_ranks_that_are_killed(ahead):
    files = {Path(word) for word in ahead.stdout.split() if word.startswith("/dev/shm/mpich")}
    assert files
    wait_for(lambda: not any(file.exists() for file in files))

"""What ends all ranks: an error of one, of all, of a helper thread, a signal."""

import errno
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from pydtnn.comm import run_threads
from pydtnn.comm.monitor import failure
from pydtnn.comm.monitor.links import READY
from tests.ahead import mpiexec
from tests.each import each

START = """
import atexit, os, signal, sys, threading, time
import numpy as np
from pydtnn.comm import agree, create_communicator
comm = create_communicator()
"""
WAIT = "\ncomm.recv(np.zeros(1), comm.rank)\n"  # from oneself: for ever
BAD = "if comm.rank == 1: raise ValueError('Bad: thing.')"

STRUCK = """
def strike():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.{number})
if comm.rank == 1: threading.Thread(target=strike).start()
"""
ODD = """
class Odd(Exception):
    def __str__(self):
        {what}
if comm.rank == 1: raise Odd
"""
TWO_HOSTS = """
from mpi4py import MPI
from pydtnn.comm.monitor import failure
from pydtnn.comm.mpi import MpiCommunicator
comm = MpiCommunicator(MPI, MPI.COMM_WORLD.Dup(), [0, 1])
failure.FORWARDING_S = 3  # the other host may be told late
failure.end_all_ranks_on_error(comm)
if comm.rank == 1: os.kill(os.getpid(), signal.SIGTERM)
"""


class End(NamedTuple):
    """How a program ends: with a status, None for any but 0, and one line."""

    ranks: int
    body: str
    status: int | None
    line: str


def odd(what, line):
    return End(3, ODD.format(what=what) + WAIT, None, line)


def struck(number, line):
    return End(2, STRUCK.format(number=number) + WAIT, None, line)


def agreed(who, line):
    leaves = 'atexit.register(os.write, 2, b"\\nleft in the ordinary way\\n")\n'
    return End(2, f"{leaves}agree(comm, ValueError('Bad: thing.') if {who} else None)", 1, line)


LONG = {
    "agreed by all": agreed("True", "Bad: thing.$"),
    "SIGINT": struck("SIGINT", r"rank 1: interrupted \(Ctrl-C\)$"),
    "SIGHUP": struck("SIGHUP", r"rank 1: terminated \(SIGHUP\)$"),
    "a description that exits": odd("sys.exit(0)", "rank 1: Odd: its .* because __str__ raises S"),
    "a description of a terminal": odd("return '\\x1b[2J'", r"rank 1: Odd: \\x1b\[2J \("),
}
ENDS = {
    "in the main thread": End(3, BAD + WAIT, None, r"rank 1: Bad: thing\."),
    "in another thread": End(
        3,
        "if comm.rank == 2: threading.Thread(target=int, args=('thing',)).start()" + WAIT,
        None,
        "rank 2: .*thing",
    ),
    "of all ranks": End(3, "raise KeyError('thing')", None, r".*KeyError: 'thing' \(<string>:6; P"),
    "agreed by one": agreed("comm.rank == 1", "rank 1: Bad: thing.$"),
    # Open MPI ends the other rank by SIGTERM too, which must not be told as a second reason.
    "SIGTERM": struck("SIGTERM", r"rank 1: terminated \(SIGTERM\)$"),
    "a description that fails": odd(
        "raise ValueError", "rank 1: Odd: its message cannot be shown, because __str__ raises V"
    ),
    # What ended the other host's rank nobody here has seen; the launcher's SIGTERM we have.
    "on two hosts": End(
        2, TWO_HOSTS + WAIT, None, r"rank 1: terminated \(SIGTERM\); launchers send it to all ranks"
    ),
    "one rank like a program of its own": End(1, BAD.replace("1", "0"), 1, "Bad: thing.$"),
    **LONG,
}


def ending(name):
    return mpiexec(ENDS[name].ranks, ["-c", START + ENDS[name].body])


@pytest.mark.ahead(call=ending)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in ENDS]
)
def test_all_ranks_end_after_one_line(ahead, name):
    _, _, status, line = ENDS[name]
    assert ahead.returncode == status if status is not None else ahead.returncode != 0
    told = [text for text in ahead.stderr.splitlines() if re.search(r"^ranks? \d|thing", text)]
    assert len(told) == 1, ahead
    assert re.match(line, told[0]), ahead
    assert "Traceback" not in ahead.stderr
    assert ("left in" in ahead.stderr) == name.startswith("agreed")  # without an abort


def with_traceback():
    environment = {"PYDTNN_TRACEBACK": "1"}
    return mpiexec(2, ["-c", START + BAD + WAIT], environment=environment)


@pytest.mark.ahead(call=with_traceback)
def test_the_traceback_is_shown_to_those_who_ask_for_it(ahead):
    assert "Traceback" in ahead.stderr
    assert "rank 1: Bad: thing." in ahead.stderr


def struck_twice(number):
    """The first signal ends the rank by an abort, which never comes here."""
    body = f"""
type(comm).abort = lambda *ignored: (os.kill(os.getpid(), signal.{number}), time.sleep(1000))
if comm.rank == 1: os.kill(os.getpid(), signal.{number})
"""
    return mpiexec(2, ["-c", START + body + WAIT])


@pytest.mark.few(1)
@pytest.mark.ahead(call=struck_twice)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_rank_that_is_still_ending(ahead, number):
    """Without an abort the launcher kills the other rank, and may report that on stdout."""
    assert ahead.returncode != 0
    told = [line for line in ahead.stderr.splitlines() if line.startswith("rank 1: ")]
    assert len(told) == 1


def hung_up():
    body = "comm.barrier()\nos.kill(os.getpid(), signal.SIGHUP)\ncomm.barrier()"
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as nohup does
    return mpiexec(2, ["-c", ignored + START + body])


@pytest.mark.ahead(call=hung_up)
def test_a_hangup_that_is_ignored_stays_so(ahead):
    assert (ahead.returncode, ahead.stderr) == (0, "")


def closing(closed):
    return mpiexec(3, ["-c", f"{START}{closed}\n{BAD}{WAIT}"])


@pytest.mark.few(1)
@pytest.mark.ahead(call=closing)
@pytest.mark.parametrize("closed", ["sys.stdout = None", "os.close(2)", "sys.stdout.close()"])
def test_an_error_that_cannot_be_printed_ends_all_ranks(ahead, closed):
    assert ahead.returncode != 0


@each(("hosts", "connected"), [("aa", [False]), ("ab", [True, True])])
def test_monitors_of_several_hosts_have_an_address_and_a_token(hosts, connected):
    sent = []

    def send(facts, links):
        sent.append(bool(facts.address and facts.port and facts.token))
        if links is not None:
            links.close()

    def rank(comm):
        started = SimpleNamespace(ranks=comm.local_size, folder=None, send=send)
        failure._supervise(comm, started if comm.local_rank == 0 else None)

    run_threads(2, rank, hosts=hosts)
    assert sent == connected


def test_a_rank_waits_until_all_are_watched():
    rank, monitor = socket.socketpair()
    with rank, monitor:
        monitor.sendall(READY)
        monitor.close()
        failure._wait(rank)
        assert not rank.recv(1)


def test_a_folder_without_room_for_the_slots_does_not_remain(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(failure, "_MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert failure._make_folder(2) is None
    assert not [*tmp_path.iterdir()]


@each(("seconds", "then", "status"), [(0.0, "input()", 7), (600.0, "", 0)])
def test_a_process_that_waits_ends_after_a_delay(seconds, then, status):
    body = f"from {failure.__name__} import exit_after; exit_after({seconds}, 7); {then}"
    with subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE) as process:
        assert process.wait(300) == status

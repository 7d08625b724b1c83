"""What ends all ranks: an error of one, of all, of a helper thread, a signal."""

import pytest

START = """
import os, signal, sys, threading, time
import numpy as np
from pydtnn.comm import agree, create_communicator
comm = create_communicator()
"""
WAIT = "\ncomm.recv(np.zeros(1), comm.rank)\n"  # from oneself: for ever


def lines_about(words, finished):
    """The lines with these words among those that our ranks and the launcher wrote."""
    assert finished.stdout == ""
    return [line for line in finished.stderr.splitlines() if words in line]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if comm.rank == 1: raise ValueError('Bad: thing.')", "rank 1: Bad: thing."),
        ("if comm.rank == 2: threading.Thread(target=int, args=('thing',)).start()", "rank 2: "),
    ],
    ids=["in the main thread", "in another thread"],
)
def test_an_error_of_one_rank_is_told_once_and_ends_all(mpiexec, body, line):
    finished = mpiexec(3, ["-c", START + body + WAIT])
    assert finished.returncode != 0
    told = lines_about("thing", finished)
    assert len(told) == 1
    assert told[0].startswith(line)
    assert "Traceback" not in finished.stderr


def test_an_error_of_all_ranks_is_told_by_one_of_them(mpiexec):
    finished = mpiexec(3, ["-c", START + "raise KeyError('thing')"])
    assert finished.returncode != 0
    assert len(lines_about("KeyError: 'thing' (<string>:6; PYDTNN_TRACEBACK=1", finished)) == 1


def test_the_traceback_is_shown_to_those_who_ask_for_it(mpiexec):
    body = "if comm.rank == 1: raise ValueError('Bad: thing.')"
    finished = mpiexec(2, ["-c", START + body + WAIT], environment={"PYDTNN_TRACEBACK": "1"})
    assert "Traceback" in finished.stderr
    assert lines_about("rank 1: Bad: thing.", finished)


@pytest.mark.parametrize(
    ("condition", "line"), [("comm.rank == 1", "rank 1: Bad: thing."), ("True", "Bad: thing.")]
)
def test_an_agreed_error_ends_all_ranks_without_an_abort(mpiexec, condition, line):
    body = f"""
import atexit
if comm.rank == 1: atexit.register(os.write, 2, b"left in the ordinary way\\n")
agree(comm, ValueError('Bad: thing.') if {condition} else None)
"""
    finished = mpiexec(2, ["-c", START + body])
    assert finished.returncode == 1
    assert lines_about("thing", finished) == [line]
    assert lines_about("left in", finished)


@pytest.mark.parametrize(
    ("number", "line"),
    [
        ("SIGTERM", "rank 1: terminated (SIGTERM)"),
        ("SIGINT", "rank 1: interrupted (Ctrl-C)"),
        ("SIGHUP", "rank 1: terminated (SIGHUP)"),
    ],
)
def test_a_signal_ends_ranks_that_wait_inside_mpi(mpiexec, number, line):
    body = f"""
def strike():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.{number})
if comm.rank == 1: threading.Thread(target=strike).start()
"""
    finished = mpiexec(2, ["-c", START + body + WAIT])
    assert finished.returncode != 0
    # Open MPI ends the other rank by SIGTERM too, which must not be told as a second reason.
    assert lines_about("(SIG", finished) + lines_about("(Ctrl", finished) == [line]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_rank_that_is_still_ending(mpiexec, number):
    """The first one ends it by an abort, which never comes here."""
    body = f"""
type(comm).abort = lambda self, code: time.sleep(1000)
if comm.rank == 1:
    os.kill(os.getpid(), signal.{number})
    time.sleep(0.5)
    os.kill(os.getpid(), signal.{number})
"""
    finished = mpiexec(2, ["-c", START + body + WAIT], timeout=30)
    assert finished.returncode != 0
    assert len(lines_about("rank 1: ", finished)) == 1


def test_a_hangup_that_is_ignored_stays_so(mpiexec):
    body = """
comm.barrier()
os.kill(os.getpid(), signal.SIGHUP)
comm.barrier()
"""
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as nohup does
    finished = mpiexec(2, ["-c", ignored + START + body])
    assert (finished.returncode, finished.stderr) == (0, "")


UNSPEAKABLE = """
class Odd(Exception):
    def __str__(self):
        WHAT
if comm.rank == 1: raise Odd
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise ValueError", "rank 1: Odd: its message cannot be shown, because __str__ raises V"),
        ("sys.exit(0)", "rank 1: Odd: its message cannot be shown, because __str__ raises S"),
        ("return 5", "rank 1: Odd: its message cannot be shown, because __str__ raises T"),
        ("return '\\x1b[2J'", "rank 1: Odd: \\x1b[2J ("),
        ("time.sleep(1000)", ""),
    ],
)
def test_an_error_that_cannot_be_described_ends_all_ranks(mpiexec, what, words):
    body = UNSPEAKABLE.replace("WHAT", what)
    finished = mpiexec(3, ["-c", START + body + WAIT], timeout=30)
    assert finished.returncode != 0
    assert words in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("closed", ["sys.stdout = None", "os.close(2)", "sys.stdout.close()"])
def test_an_error_that_cannot_be_printed_ends_all_ranks(mpiexec, closed):
    body = f"{closed}\nif comm.rank == 1: raise ValueError('Bad: thing.')"
    assert mpiexec(3, ["-c", START + body + WAIT], timeout=30).returncode != 0


LEAVES = {
    "with a status": "sys.exit(3)",
    "with status 0": "sys.exit(0)",
    "by raising SystemExit": "raise SystemExit",
    "at the end of the program": "ENDED",
}
CALLS = {
    "a collective": "comm.allreduce(np.ones(5))",
    "a collective that does not wait": "comm.iallreduce(np.ones(5)).wait()",
    "a message": "comm.recv(np.ones(5), 1)",
    "a collective of a group": "comm.split(0).gather_object(5)",
}


@pytest.mark.parametrize(
    ("leaves", "call", "ranks"),
    [
        *((leaves, CALLS["a collective"], 2) for leaves in LEAVES.values()),
        *((LEAVES["with status 0"], call, 3) for call in CALLS.values()),
    ],
)
def test_a_rank_that_waits_for_one_that_has_left_ends_all(mpiexec, leaves, call, ranks):
    if leaves == "ENDED":
        body = f"if comm.rank != 1: {call}"
    else:
        body = f"if comm.rank == 1: {leaves}\n{call}"
    finished = mpiexec(ranks, ["-c", START + body], timeout=30)
    assert finished.returncode != 0
    (told,) = lines_about("rank ", finished)
    assert "for rank 1, whose program has ended; all ranks must make the same calls" in told


def test_ranks_may_leave_one_after_the_other(mpiexec):
    """Those that still work need no rank that has left."""
    body = """
group = comm.split(comm.rank == 2)
if comm.rank == 2: sys.exit(0)
time.sleep(3)
group.allreduce(np.ones(3))
if comm.rank == 0:
    group.send(np.ones(3), 1)
    time.sleep(3)
else:
    group.recv(np.ones(3), 0)
"""
    finished = mpiexec(3, ["-c", START + body], timeout=30)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_rank_may_wait_long_for_one_that_is_still_there(mpiexec):
    body = """
if comm.rank == 1: sys.exit(0)
if comm.rank == 2: time.sleep(4)
x = np.ones(3)
comm.send(x, 0) if comm.rank == 2 else comm.recv(x, 2)
"""
    finished = mpiexec(3, ["-c", START + body], timeout=30)
    assert (finished.returncode, finished.stderr) == (0, "")


TWO_HOSTS = """
from mpi4py import MPI
from pydtnn.comm.failure import end_all_ranks_on_error
from pydtnn.comm.mpi import MpiCommunicator
comm = MpiCommunicator(MPI, MPI.COMM_WORLD.Dup(), [0, 1])
end_all_ranks_on_error(comm)
if comm.rank == 1: os.kill(os.getpid(), signal.SIGTERM)
"""


def test_between_hosts_a_signal_is_not_taken_for_the_cause(mpiexec):
    """What ended the other host's rank nobody here has seen; the launcher's SIGTERM we have."""
    finished = mpiexec(2, ["-c", START + TWO_HOSTS + WAIT])
    told = "rank 1: terminated (SIGTERM); launchers send it to all ranks where one has ended"
    assert lines_about(told, finished)


def test_one_rank_under_mpiexec_ends_like_a_program_of_its_own(mpiexec):
    finished = mpiexec(1, ["-c", START + "raise ValueError('Bad: thing.')"])
    assert finished.returncode == 1
    assert lines_about("thing", finished) == ["Bad: thing."]

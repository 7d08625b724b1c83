"""What ends all ranks: an error of one, of all, of a helper thread, a signal."""

import pytest

from tests.ahead import mpiexec

START = """
import os, signal, sys, threading, time
import numpy as np
from pydtnn.comm import agree, create_communicator
comm = create_communicator()
"""
WAIT = "\ncomm.recv(np.zeros(1), comm.rank)\n"  # from oneself: for ever


def ending(ranks, body, **options):
    """Run a program that ends within seconds, whoever waits for ever."""
    return mpiexec(ranks, ["-c", START + body], timeout=60, **options)


def waiting(body):
    """Run a program whose ranks wait for ever once they have done what the body says."""
    return ending(3, body + WAIT)


def lines_about(words, finished):
    """The lines with these words among those that our ranks and the launcher wrote."""
    assert finished.stdout == ""
    return [line for line in finished.stderr.splitlines() if words in line]


@pytest.mark.ahead(call=waiting)
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if comm.rank == 1: raise ValueError('Bad: thing.')", "rank 1: Bad: thing."),
        ("if comm.rank == 2: threading.Thread(target=int, args=('thing',)).start()", "rank 2: "),
    ],
    ids=["in the main thread", "in another thread"],
)
def test_an_error_of_one_rank_is_told_once_and_ends_all(ahead, body, line):
    assert ahead.returncode != 0
    told = lines_about("thing", ahead)
    assert len(told) == 1
    assert told[0].startswith(line)
    assert "Traceback" not in ahead.stderr


@pytest.mark.ahead(call=lambda: ending(3, "raise KeyError('thing')"))
def test_an_error_of_all_ranks_is_told_by_one_of_them(ahead):
    assert ahead.returncode != 0
    assert len(lines_about("KeyError: 'thing' (<string>:6; PYDTNN_TRACEBACK=1", ahead)) == 1


def with_traceback():
    body = "if comm.rank == 1: raise ValueError('Bad: thing.')"
    return ending(2, body + WAIT, environment={"PYDTNN_TRACEBACK": "1"})


@pytest.mark.ahead(call=with_traceback)
def test_the_traceback_is_shown_to_those_who_ask_for_it(ahead):
    assert "Traceback" in ahead.stderr
    assert lines_about("rank 1: Bad: thing.", ahead)


def agreeing(condition):
    body = f"""
import atexit
if comm.rank == 1: atexit.register(os.write, 2, b"left in the ordinary way\\n")
agree(comm, ValueError('Bad: thing.') if {condition} else None)
"""
    return ending(2, body)


@pytest.mark.ahead(call=agreeing)
@pytest.mark.parametrize(
    ("condition", "line"), [("comm.rank == 1", "rank 1: Bad: thing."), ("True", "Bad: thing.")]
)
def test_an_agreed_error_ends_all_ranks_without_an_abort(ahead, condition, line):
    assert ahead.returncode == 1
    assert lines_about("thing", ahead) == [line]
    assert lines_about("left in", ahead)


def struck(number):
    body = f"""
def strike():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.{number})
if comm.rank == 1: threading.Thread(target=strike).start()
"""
    return ending(2, body + WAIT)


@pytest.mark.ahead(call=struck)
@pytest.mark.parametrize(
    ("number", "line"),
    [
        ("SIGTERM", "rank 1: terminated (SIGTERM)"),
        ("SIGINT", "rank 1: interrupted (Ctrl-C)"),
        ("SIGHUP", "rank 1: terminated (SIGHUP)"),
    ],
)
def test_a_signal_ends_ranks_that_wait_inside_mpi(ahead, number, line):
    assert ahead.returncode != 0
    # Open MPI ends the other rank by SIGTERM too, which must not be told as a second reason.
    assert lines_about("(SIG", ahead) + lines_about("(Ctrl", ahead) == [line]


def struck_twice(number):
    """The first signal ends the rank by an abort, which never comes here."""
    body = f"""
type(comm).abort = lambda self, code: time.sleep(1000)
if comm.rank == 1:
    os.kill(os.getpid(), signal.{number})
    time.sleep(0.5)
    os.kill(os.getpid(), signal.{number})
"""
    return ending(2, body + WAIT)


@pytest.mark.few(1)
@pytest.mark.ahead(call=struck_twice)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_rank_that_is_still_ending(ahead, number):
    """Without an abort the launcher kills the other rank, and may report that on stdout."""
    assert ahead.returncode != 0
    told = [line for line in ahead.stderr.splitlines() if line.startswith("rank 1: ")]
    assert len(told) == 1


def hung_up():
    body = """
comm.barrier()
os.kill(os.getpid(), signal.SIGHUP)
comm.barrier()
"""
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as nohup does
    return mpiexec(2, ["-c", ignored + START + body])


@pytest.mark.ahead(call=hung_up)
def test_a_hangup_that_is_ignored_stays_so(ahead):
    assert (ahead.returncode, ahead.stderr) == (0, "")


UNSPEAKABLE = """
class Odd(Exception):
    def __str__(self):
        WHAT
if comm.rank == 1: raise Odd
"""


@pytest.mark.few(1)
@pytest.mark.ahead(call=lambda what: waiting(UNSPEAKABLE.replace("WHAT", what)))
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
def test_an_error_that_cannot_be_described_ends_all_ranks(ahead, what, words):
    assert ahead.returncode != 0
    assert words in ahead.stderr
    assert "Traceback" not in ahead.stderr


@pytest.mark.ahead(
    call=lambda closed: waiting(f"{closed}\nif comm.rank == 1: raise ValueError('Bad: thing.')")
)
@pytest.mark.parametrize("closed", ["sys.stdout = None", "os.close(2)", "sys.stdout.close()"])
def test_an_error_that_cannot_be_printed_ends_all_ranks(ahead, closed):
    assert ahead.returncode != 0


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


def left(leaves, call, ranks):
    if leaves == "ENDED":
        return ending(ranks, f"if comm.rank != 1: {call}")
    return ending(ranks, f"if comm.rank == 1: {leaves}\n{call}")


@pytest.mark.few(1)
@pytest.mark.ahead(call=left)
@pytest.mark.parametrize(
    ("leaves", "call", "ranks"),
    [
        *((leaves, CALLS["a collective"], 2) for leaves in LEAVES.values()),
        *((LEAVES["with status 0"], call, 3) for call in CALLS.values()),
        (LEAVES["with status 0"], "comm.recv(np.ones(5), None)", 2),
    ],
)
def test_a_rank_that_waits_for_one_that_has_left_ends_all(ahead, leaves, call, ranks):
    assert ahead.returncode != 0
    (told,) = lines_about("rank ", ahead)
    assert "for rank 1, whose program has ended; all ranks must make the same calls" in told


def leaving_one_after_the_other():
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
    return ending(3, body)


@pytest.mark.ahead(call=leaving_one_after_the_other)
def test_ranks_may_leave_one_after_the_other(ahead):
    """Those that still work need no rank that has left."""
    assert (ahead.returncode, ahead.stderr) == (0, "")


def waiting_long():
    body = """
if comm.rank == 1: sys.exit(0)
if comm.rank == 2: time.sleep(4)
x = np.ones(3)
comm.send(x, 0) if comm.rank == 2 else comm.recv(x, 2)
"""
    return ending(3, body)


@pytest.mark.ahead(call=waiting_long)
def test_a_rank_may_wait_long_for_one_that_is_still_there(ahead):
    assert (ahead.returncode, ahead.stderr) == (0, "")


TWO_HOSTS = """
from mpi4py import MPI
from pydtnn.comm.failure import end_all_ranks_on_error
from pydtnn.comm.mpi import MpiCommunicator
comm = MpiCommunicator(MPI, MPI.COMM_WORLD.Dup(), [0, 1])
end_all_ranks_on_error(comm)
if comm.rank == 1: os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.ahead(call=lambda: ending(2, TWO_HOSTS + WAIT))
def test_between_hosts_a_signal_is_not_taken_for_the_cause(ahead):
    """What ended the other host's rank nobody here has seen; the launcher's SIGTERM we have."""
    told = "rank 1: terminated (SIGTERM); launchers send it to all ranks where one has ended"
    assert lines_about(told, ahead)


@pytest.mark.ahead(call=lambda: ending(1, "raise ValueError('Bad: thing.')"))
def test_one_rank_under_mpiexec_ends_like_a_program_of_its_own(ahead):
    assert ahead.returncode == 1
    assert lines_about("thing", ahead) == ["Bad: thing."]

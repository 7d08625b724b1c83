"""What MPI needs so that ranks continue without those that fail: User-Level Failure Mitigation.

A call in which a rank has failed may succeed on some ranks where it fails on others. These would
then wait for each other in groups that only some of them have. So the creation of a group is
followed by an agreement on its outcome.

References
----------
Bland, Bouteiller, Herault, Bosilca, Dongarra: Post-failure recovery of MPI communication
capability. International Journal of High Performance Computing Applications 27(3), 2013.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pydtnn.comm.monitor.processes import condition_of, find_ranks
from pydtnn.comm.monitor.state import FAILED, LOST, RunState, WatchedRun
from pydtnn.utils.errors import RankFailure, write_error
from pydtnn.utils.launcher import local_ranks, survives
from pydtnn.utils.request import Request

Made = TypeVar("Made")

_ATTEMPTS = 20
"""Attempts to create a group; each may be disturbed by the failure of another rank."""


def is_failure(mpi: Any, error: Exception) -> bool:
    """Return whether a call has failed because of a failed rank, noticed here or by another one."""
    failures = mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED
    return isinstance(error, mpi.Exception) and error.Get_error_class() in failures


def create_together(
    mpi: Any, base: Any, make: Callable[[], Any], create: Callable[[Any], Made]
) -> Made:
    """Create objects on a new communicator, again without ranks that fail meanwhile.

    Collective: all remaining ranks call it.

    Parameters
    ----------
    mpi : module
    base : mpi4py.MPI.Intracomm
        Ranks some of which may have failed.
    make : callable
        Makes the communicator: `base.Dup` or `base.Shrink`.
    create : callable
        Creates the objects on it.
    """
    if not survives():
        return create(make())
    problem: BaseException = RankFailure()
    for _ in range(_ATTEMPTS):
        comm, made = None, None
        try:
            comm = make()
            made = create(comm)
        except (RankFailure, Exception) as error:  # of any kind: a failed call may return garbage
            problem = error
        if all_succeeded(mpi, base, made is not None) and made is not None:
            return made
        if comm:
            comm.Revoke()
        make = base.Shrink
    raise problem


def all_succeeded(mpi: Any, comm: Any, success: bool) -> bool:
    """Return, on all remaining ranks alike, whether all have succeeded and none fails unseen."""
    comm.Ack_failed()
    try:
        return bool(comm.Agree(int(success)))
    except mpi.Exception as error:
        if not is_failure(mpi, error):
            raise
        return False


REVOKED_S = 2.0
"""Seconds in which operations on revoked groups are complete."""


def complete_all(requests: Iterable[Request]) -> None:
    """Wait until no operation of revoked groups accesses its array any more."""
    until = time.monotonic() + REVOKED_S
    for request in [*requests]:
        with contextlib.suppress(Exception, RankFailure):  # errors of many kinds have been seen
            while not request.test() and time.monotonic() < until:
                time.sleep(1e-5)


# -- the start ------------------------------------------------------------------------------------

_INTERVAL_S = 0.1
"""Seconds between two looks at the processes of the ranks."""

_ALL_STARTED_S = 5.0
"""Seconds in which the launcher has started all ranks of a host."""

_KILL_GRACE_S = 10.0
"""Seconds beyond the deadline in which ranks of other hosts may be killed."""

_END = signal.SIGRTMIN
"""Signal that ends this rank with its number as the status."""


@contextlib.contextmanager
def watched_start(timeout: float) -> Iterator[Callable[[], None]]:
    """Context in which this rank joins the others, until the monitor processes watch all ranks.

    A process watches the ranks of this host meanwhile, since no thread of Python runs while MPI
    starts. It kills ranks that are stopped for longer than the deadline. If one ends before MPI has
    started, which waits for all ranks, it ends this rank, too; likewise if the others are not there
    after the deadline.

    Parameters
    ----------
    timeout : float
        The deadline, in s; 0 for none.

    Yields
    ------
    callable
        To be called when MPI has started, from when on ranks continue without those that end.
    """
    if not survives():
        yield lambda: None
        return
    own, (read, write) = os.getpid(), os.pipe()

    def begun() -> None:
        os.write(write, b"!")

    watcher = os.fork()
    if not watcher:
        os.close(write)
        with contextlib.suppress(BaseException):
            _watch(own, read, timeout or math.inf)
        os._exit(0)
    os.close(read)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), None
    library.signal(_END, ctypes.cast(library._exit, ctypes.c_void_p))  # 0 after other signals
    try:
        yield begun
    finally:
        os.close(write)
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


def _watch(own: int, started: int, timeout: float) -> None:
    """Watch the ranks of this host; `started` is readable once MPI has started on this one."""
    with open(f"/proc/{own}/stat") as stat:
        launcher = int(stat.read().rpartition(")")[2].split()[1])
    watched, number, mine = os.pidfd_open(launcher), local_ranks(), int(os.environ[_RANK])
    begin, waited, before = time.monotonic(), 0.0, time.monotonic()
    run, ranks = WatchedRun((), RunState.STARTING), dict[int, int]()  # by their pidfds
    stopped: defaultdict[int, float] = defaultdict(float)  # for how long, by rank
    while os.getppid() == own:
        time.sleep(_INTERVAL_S)
        if len(ranks) < number:
            for file in ranks:
                os.close(file)
            ranks = find_ranks(launcher, _RANK.encode())
        now = time.monotonic()
        passed, before = min(now - before, 2 * _INTERVAL_S), now  # not while all are stopped
        failed = {ranks[file] for file in select.select(ranks, [], [], 0)[0]}
        frozen = {rank: file for file, rank in ranks.items() if _is_stopped(file)}
        if mine in frozen:
            continue
        first = mine == min({*ranks.values()} - failed - {*frozen}, default=mine)
        for rank, file in frozen.items():
            stopped[rank] += passed
            if first and stopped[rank] > timeout and run.on(LOST):
                write_error(
                    f"no progress for {timeout:g} s (--timeout): rank {rank} is stopped; killed\n"
                )
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(file, signal.SIGKILL)
        waited = 0.0 if frozen else waited + passed
        missing = len(ranks) < number and now > begin + _ALL_STARTED_S
        late = waited > timeout + _KILL_GRACE_S
        fails = (failed or missing) and not select.select([started], [], [], 0)[0]
        if (late or fails) and run.on("late" if late else FAILED):
            who = f"rank {min(failed)}" if failed else "a rank"
            text = f"{who}: failed before MPI had started, which no rank survives"
            if late:
                text = f"no progress for {waited:.0f} s (--timeout): not all ranks have started"
            if first:
                write_error(f"{text}; start again\n")
            time.sleep(3 * _INTERVAL_S)  # until all have noticed it, before more ranks end
            os.kill(own, _END)
            # Where ranks of other hosts do not end, the launcher waits for them.
            if late and first and not select.select([watched], [], [], _ALL_STARTED_S)[0]:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            return


_RANK = "OMPI_COMM_WORLD_RANK"


def _is_stopped(file: int) -> bool:
    """Return whether the process of a pidfd is stopped."""
    with open(f"/proc/self/fdinfo/{file}") as facts:
        number = re.search(r"^Pid:\s*(-?[0-9]+)$", facts.read(), re.M)
    return number is not None and condition_of(int(number[1])).why.startswith("stopped")

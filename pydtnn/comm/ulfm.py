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
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pydtnn.comm.monitor.ranks import find_ranks
from pydtnn.utils.errors import RankFailure
from pydtnn.utils.launcher import ranks_here, survives
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


# -- the start of MPI -----------------------------------------------------------------------------

_INTERVAL_S = 0.1
"""Seconds between two looks at the processes of the ranks."""

_ALL_STARTED_S = 5.0
"""Seconds in which the launcher has started all ranks of a host."""


@contextlib.contextmanager
def end_if_one_fails() -> Iterator[None]:
    """Context in which MPI starts, which waits for all ranks: if one fails, the others end, too.

    A process watches those of this host, since no thread of Python runs while MPI starts. It ends
    this rank by SIGTERM, whose handler is `_exit`, as the launcher's status is 0 after signals.
    """
    if not survives():
        yield
        return
    own = os.getpid()
    watcher = os.fork()
    if not watcher:
        with contextlib.suppress(BaseException):
            _watch(own)
        os._exit(0)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), None
    before = signal.getsignal(signal.SIGTERM)
    library.signal(signal.SIGTERM, ctypes.cast(library._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


def _watch(own: int) -> None:
    """End the process of this rank if another rank of this host fails."""
    with open(f"/proc/{own}/stat") as stat:
        launcher = int(stat.read().rpartition(")")[2].split()[1])
    number, begin = ranks_here(), time.monotonic()
    ranks: dict[int, int] = {}  # by their pidfds
    while os.getppid() == own:
        time.sleep(_INTERVAL_S)
        if len(ranks) < number:
            for file in ranks:
                os.close(file)
            ranks = find_ranks(launcher, b"OMPI_COMM_WORLD_RANK")
        failed = {ranks[file] for file in select.select(ranks, [], [], 0)[0]}
        missing = len(ranks) < number and time.monotonic() > begin + _ALL_STARTED_S
        if failed or missing:
            if os.environ["OMPI_COMM_WORLD_RANK"] == str(min({*ranks.values()} - failed)):
                who = f"rank {min(failed)}" if failed else "a rank"
                text = (
                    f"{who}: failed before MPI had started, which no rank survives; start again\n"
                )
                os.write(2, text.encode())
            time.sleep(3 * _INTERVAL_S)  # until all have noticed it, before more ranks end
            os.kill(own, signal.SIGTERM)
            return

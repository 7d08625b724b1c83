"""The start of MPI, which no rank survives: Open MPI waits for a rank that has died in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator

from pydtnn.comm.monitor.ranks import find_ranks
from pydtnn.utils.launcher import ranks_here, survives

INTERVAL_S = 0.1
"""Seconds between two looks at the processes of the ranks."""

ALL_STARTED_S = 5.0
"""Seconds in which the launcher has started all ranks of a host."""


@contextlib.contextmanager
def ended_if_one_dies() -> Iterator[None]:
    """Context in which MPI starts, if ranks may die: then the others of the host end, too.

    A process watches them, since no thread of Python runs while MPI starts. It ends this one by
    SIGTERM, whose handler is `_exit`, as the launcher's status is 0 after signals.
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
    """End the process of this rank if another rank of this host dies before MPI has started."""
    with open(f"/proc/{own}/stat") as stat:
        parent = int(stat.read().rpartition(")")[2].split()[1])
    ranks, begin = ranks_here(), time.monotonic()
    files: dict[int, int] = {}  # pidfds, and the ranks
    while os.getppid() == own:
        time.sleep(INTERVAL_S)
        if len(files) < ranks:
            for file in files:
                os.close(file)
            files = find_ranks(parent, b"OMPI_COMM_WORLD_RANK")
        dead = [files[file] for file in select.select(files, [], [], 0)[0]]
        missing = len(files) < ranks and time.monotonic() > begin + ALL_STARTED_S
        if dead or missing:
            if os.environ["OMPI_COMM_WORLD_RANK"] == str(min({*files.values()} - {*dead})):
                who = f"rank {dead[0]}" if dead else "a rank"
                text = f"{who}: died before MPI had started, which no rank survives; start again\n"
                os.write(2, text.encode())
            time.sleep(3 * INTERVAL_S)  # until all have noticed it, before more ranks end
            os.kill(own, signal.SIGTERM)
            return

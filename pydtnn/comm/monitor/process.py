"""The program of the monitor process of a host.

It observes what each rank is doing (`pydtnn.comm.monitor.monitor`), and ends the others when one
has failed. Signals that are sent to every process of a job do not end it before its ranks. The file
is run by its path, and imports no NumPy, so that the process is small and starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import types

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals for the ranks, which end or report; this process ends after them."""

START_ERROR_S = 1.0
"""Time in which an error of all ranks before they are connected ends this process, in s."""

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def main() -> None:
    """Watch the ranks.

    The arguments are a list in JSON and the folder of this package. The list has two open file
    descriptors, of the listener and of the slots, the length of the slots in B, the number of ranks
    to watch, that of all ranks, and the items of what `find_ranks` has returned. The standard input
    is a socket for the other facts.
    """
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    _continue_with_parent()
    known, folder = sys.argv[1:]
    listener, slots, length, ranks, of, pairs = json.loads(known)
    starting = dict(pairs)
    _skip_initialisation(folder)
    from pydtnn.comm.monitor.ranks import EndedEarlyError, EndReport, Kills, accept_ranks
    from pydtnn.comm.monitor.state import FAILED, RunState, WatchedRun
    from pydtnn.utils.launcher import survives

    file = os.open(f"/proc/self/fd/{slots}", os.O_WRONLY | os.O_APPEND)
    end_report = EndReport(file, length, Kills(), ranks == of)
    poll = select.epoll()
    connecting = socket.socket(fileno=listener)
    files = os.path.dirname(connecting.getsockname())
    run = WatchedRun(range(ranks), RunState.STARTING)
    try:
        ended = set(select.select(starting, [], [], 0)[0])
        if starting and (ended or len(starting) < ranks):
            # Which was first is known if it is the only one.
            missing = {*range(ranks)} - {starting[one] for one in starting if one not in ended}
            raise EndedEarlyError(min(missing) if ranks == of and len(missing) == 1 else -1)
        starter = 0 if survives() else None  # where ranks fail, the others start another process
        connections = accept_ranks(connecting, ranks, poll, starting, starter)
    except EndedEarlyError as early:
        if survives() or not run.end_of(early.rank, FAILED):
            return
        time.sleep(START_ERROR_S)
        end_report.report(early.rank, "it ended before all ranks had started")
        for number in starting:
            with contextlib.suppress(OSError):  # it has ended, too
                signal.pidfd_send_signal(number, signal.SIGTERM)
        import shutil

        shutil.rmtree(files, ignore_errors=True)  # the first rank has not reached that
        return
    # Imported now, so that the ranks, which are connected, need not wait for it.
    from pydtnn.comm.monitor.monitor import HostMonitor, receive_facts
    from pydtnn.comm.monitor.slots import slots_in

    facts, others = receive_facts()
    HostMonitor(
        facts, slots_in(slots, len(facts.ranks)), end_report, poll, connections, others
    ).run()


def _skip_initialisation(folder: str) -> None:
    """Let packages be imported without their `__init__`, which imports NumPy."""
    for name in ("pydtnn", "pydtnn.comm"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        sys.modules[name] = module


def _continue_with_parent() -> None:
    """Have the system continue this process when the rank that started it ends.

    A process that is stopped would otherwise remain.
    """
    with contextlib.suppress(AttributeError, OSError, ImportError):  # Linux only
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    main()

"""How a run on several ranks ends when one of them fails.

A rank that fails prints one line and aborts the job: the others may be waiting for it inside MPI
and would wait for ever. Where several fail at once, the first on each host speaks for them. Of a
rank that is killed another process tells (`pydtnn.comm.witness`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.witness import Witness
from pydtnn.errors import AgreedError, describe, traceback_if_wanted

_PATIENCE = 2.0
"""Seconds that a rank leaves to the one that failed before it for printing and aborting."""

_FORWARDING = 0.3
"""Seconds that the launcher gets to pass the line on: an abort may overtake its pipes."""


def end_all_ranks_on_error(comm: Communicator) -> None:
    """Let an error of one rank end all of them. Collective: all ranks call it.

    From now on an uncaught exception, in any thread, prints "rank 3: reason" to the standard error
    once and aborts all ranks with status 1; with PYDTNN_TRACEBACK=1 the traceback comes before it.
    An `AgreedError`, which all ranks raise together, is printed by rank 0 and nobody aborts. SIGINT
    (Ctrl-C) and SIGTERM end all ranks at once with status 130 and 143, even while the rank waits
    inside MPI, where Python's own handlers would not run. A rank that is killed is told of, too,
    where all ranks are on one host or it was for want of memory; ending it all is then left to the
    launcher.

    Parameters
    ----------
    comm : Communicator
        All ranks of the run. With one rank there is no prefix, and the interpreter ends as usual.
    """
    _Failure(comm).install()


class _Failure:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._witness = Witness(comm)

    def install(self) -> None:
        before = getattr(sys.excepthook, "__self__", None)
        if isinstance(before, _Failure):  # of an earlier communicator of this run
            before._witness.leave()
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        if self._comm.size > 1 and threading.current_thread() is threading.main_thread():
            self._watch_signals()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AgreedError):
            if self._comm.rank == 0:
                _print(f"{describe(error)}\n")
            if self._comm.rank in error.ranks[:1]:
                _print(traceback_if_wanted(error))
        elif self._comm.size == 1:
            _print(f"{traceback_if_wanted(error)}{describe(error)}\n")
        else:
            self._end(describe(error), traceback_if_wanted(error), 1)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None and args.exc_type is not SystemExit:
            # Whoever waits for this thread would wait for ever, with one rank as well.
            self._end(describe(error), traceback_if_wanted(error), 1)

    def _end(self, reason: str, trace: str, code: int) -> None:
        if self._witness.is_first():
            _print(f"{trace}{self._prefix()}{reason}\n")
            time.sleep(_FORWARDING)
        else:
            time.sleep(_PATIENCE)
        self._comm.abort(code)

    def _prefix(self) -> str:
        return f"rank {self._comm.rank}: " if self._comm.size > 1 else ""

    def _watch_signals(self) -> None:
        """Act on signals in a thread of its own.

        A handler written in Python runs in the main thread between two instructions, and so never
        while that thread is inside an MPI call. What the handler in C writes into a pipe is read
        at once.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in _SIGNALS:
            signal.signal(number, _leave_to_the_watcher)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def _watch(self, reader: int) -> None:
        number = 0
        while number not in _SIGNALS:
            number = os.read(reader, 1)[0]
        self._end(_SIGNALS[number] + self._elsewhere(number), "", 128 + number)

    def _elsewhere(self, number: int) -> str:
        """Say what else SIGTERM may mean, where nobody sees every rank."""
        if number == signal.SIGTERM and self._comm.local_size < self._comm.size:
            return "; launchers send it to all ranks where one has ended"
        return ""


_SIGNALS: dict[int, str] = {
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGTERM: "terminated (SIGTERM)",
}


def _leave_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """Keep Python from raising KeyboardInterrupt, and the system from ending this rank alone."""


def _print(text: str) -> None:
    """Write in one piece, so that lines of several ranks do not mix."""
    sys.stdout.flush()
    if text:
        os.write(2, text.encode(errors="replace"))

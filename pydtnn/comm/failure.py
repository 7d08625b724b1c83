"""Termination of a run on several ranks when one of them fails.

A rank that fails prints one line and aborts the job: the others may be waiting for it inside MPI
and would deadlock. If several fail at once, the first on each host reports. A killed rank is
reported by another process (`pydtnn.comm.reporter`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.monitor import FINISHING
from pydtnn.comm.reporter import Reporter, Started
from pydtnn.comm.signals import SIGNALS, SignalWatch
from pydtnn.comm.supervision import Supervision
from pydtnn.utils.errors import AgreedError, Interrupted, describe, requested_traceback

_PATIENCE = 1.0
"""Seconds during which a rank lets a rank that failed before it print and abort."""

_LONGEST = 5.0
"""Seconds allowed for describing an error and aborting; then the process exits on its own."""

_FORWARDING = 0.3
"""Seconds for the launcher to forward the line, as an abort may overtake its pipes."""


def end_all_ranks_on_error(comm: Communicator, started: Started | None = None) -> Failure:
    """Terminate all ranks on an uncaught error of one of them. Collective: all ranks call it.

    From then on an uncaught exception, in any thread, prints "rank 3: reason" to the standard error
    once and aborts all ranks with status 1; with PYDTNN_TRACEBACK=1 the traceback precedes it. An
    `AgreedError`, which all ranks raise together, is printed by rank 0 without an abort. SIGINT
    (Ctrl-C), SIGTERM and SIGHUP terminate all ranks at once with status 130, 143 and 129, even
    while the rank waits inside MPI, where Python's own handlers would not run. A second signal ends
    the process immediately; SIGHUP has no effect if it is ignored, as by `nohup`. A killed rank is
    reported as well if all ranks are on one host or the system ran out of memory; the launcher
    then terminates the others.

    Parameters
    ----------
    comm : Communicator
        All ranks of the run. With one rank there is no prefix, and the interpreter ends as usual.
    started : Started, optional
        See `Reporter`.

    Returns
    -------
    Failure
    """
    failure = Failure(comm, started)
    failure.install()
    return failure


def watched() -> Communicator | None:
    """Return the communicator given to `end_all_ranks_on_error`, or None."""
    failure = getattr(sys.excepthook, "__self__", None)
    return failure.comm if isinstance(failure, Failure) else None


class Failure:
    """The hooks of `end_all_ranks_on_error`.

    Parameters
    ----------
    comm : Communicator
        All ranks.
    started : Started, optional
        See `Reporter`.
    """

    def __init__(self, comm: Communicator, started: Started | None = None) -> None:
        self.comm = comm
        self._reporter = Reporter(comm, started)
        self._signals: SignalWatch | None = None

    @property
    def supervision(self) -> Supervision:
        """What this rank shares with the monitor process of its host."""
        return self._reporter.supervision

    def install(self) -> None:
        self._reporter.connect(self._end_with, self._end_by_signal)
        before = getattr(sys.excepthook, "__self__", None)
        if isinstance(before, Failure):  # of an earlier communicator of this run
            before._withdraw()
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        if self.comm.size > 1 and threading.current_thread() is threading.main_thread():
            leave = _defer_to_signal_thread
            always = (signal.SIGINT, signal.SIGTERM)  # even if the launcher ignores them
            self._signals = SignalWatch(
                leave,
                leave,
                self._end_by_signal,
                always,
                self.supervision.last_step,
                self.supervision.request_table,
            )

    def _withdraw(self) -> None:
        """Uninstall the handlers when a later communicator installs its own."""
        self._reporter.leave()
        if self._signals is not None and threading.current_thread() is threading.main_thread():
            self._signals.stop()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AgreedError):
            if self.comm.rank == 0:
                _print(f"{describe(error)}\n")
            if self.comm.rank in error.ranks[:1]:
                _print(requested_traceback(error))
            if isinstance(error, Interrupted):
                raise SystemExit(128 + error.signal)
        elif self.comm.size == 1:
            _print(f"{requested_traceback(error)}{describe(error)}\n")
        else:
            self._end_by(error)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None and args.exc_type is not SystemExit:
            self._end_by(error)  # code that joins this thread would deadlock, with one rank as well

    def end_because(self, reason: str) -> None:
        """Terminate all ranks; `reason` is printed once."""
        self._exit_later(1)
        self._end(f"{self._prefix()}{reason}", 1)

    def _end_with(self, code: int, reason: str) -> None:
        """Terminate all ranks; an empty reason has been printed."""
        self._exit_later(code)
        if reason:
            self._end(reason, code)
        self.comm.abort(code)

    def _end_by(self, error: BaseException) -> None:
        """Terminate all ranks, even if describing the error fails."""
        reason, trace = type(error).__name__, ""
        self._exit_later(1)
        try:
            reason, trace = describe(error), requested_traceback(error)
        finally:
            self._end(f"{trace}{self._prefix()}{reason}", 1)

    def _exit_later(self, code: int) -> None:
        finishing = FINISHING if self.supervision.finishes else 0.0
        exit_after(_LONGEST + finishing, code)

    def _end(self, reason: str, code: int) -> None:
        try:
            first = self._reporter.is_first()
            if first:
                _print(f"{reason}\n")
            self.supervision.finish_all()
            time.sleep(_FORWARDING if first else _PATIENCE)
        finally:
            self.comm.abort(code)

    def _prefix(self) -> str:
        return f"rank {self.comm.rank}: " if self.comm.size > 1 else ""

    def _end_by_signal(self, number: int) -> None:
        reason = f"{self._prefix()}{SIGNALS[number]}{self._elsewhere(number)}"
        self._end(reason, 128 + number)

    def _elsewhere(self, number: int) -> str:
        """Return other possible causes of SIGTERM, if no process monitors all ranks."""
        if number == signal.SIGTERM and self.comm.local_size < self.comm.size:
            return "; launchers send it to all ranks where one has ended"
        return ""


def exit_after(seconds: float, code: int) -> None:
    """Terminate this process after a delay, if it is still running."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def _defer_to_signal_thread(number: int, frame: FrameType | None) -> None:
    """Prevent KeyboardInterrupt in Python, and termination of this rank alone by the system."""


def _print(text: str) -> None:
    """Write in one piece, so that lines of ranks do not mix; ignore errors of the stream."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))

"""Signals that terminate a run, SIGINT (Ctrl-C), SIGTERM and SIGHUP, and SIGUSR1, which reports.

A handler written in Python runs in the main thread between two instructions, hence not while that
thread is in a kernel or inside MPI. But the C-level handler writes the number of the signal into a
pipe, which a separate thread reads at once. That thread also ends the process if it has not ended
otherwise in time, or if a second signal arrives. After the first signal a run may complete its
step, if it is in one; then the second signal is as the first one is elsewhere.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from pydtnn.comm.monitor.supervision import WATCHER, LastStep

SIGNALS: dict[int, str] = {
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGTERM: "terminated (SIGTERM)",
    signal.SIGHUP: "terminated (SIGHUP)",
}
"""The signals that end a run, and the text by which each is reported."""


def describe_signal(number: int) -> str:
    """Return the text by which a signal that ends a run is reported."""
    return SIGNALS.get(number, f"ended by {signal.Signals(number).name}")


DEFERRED = (signal.SIGINT, signal.SIGTERM)
"""The signals after which a step may be completed."""

GRACE = 1.5
"""Seconds that a run may take to end after the first signal."""

_STOP = 0
"""Written into the pipe to end the thread; no signal has this number."""

Handler = Callable[[int, FrameType | None], Any]


class SignalWatch:
    """Handles the first signal, and ends the process on a second one or after some seconds.

    Must be created and stopped in the main thread. A signal that is ignored remains ignored: SIGHUP
    under `nohup`, SIGINT in a background job of a shell.

    Parameters
    ----------
    handler : callable
        Python handler of the signals, called in the main thread when that is possible.
    act : callable
        Called with the number of the first signal, at once and in a separate thread.
    orderly : LastStep
        Ends the run after its step on the first SIGINT or SIGTERM, if that is possible. Then `act`
        is called on the second signal, or when the step is overdue.
    report : callable
        Called when SIGUSR1 arrives, in a separate thread. If it also means the end of the job, the
        run then ends after its step.
    always : collection of int
        Signals that are handled even if they are ignored.
    grace : float
        Seconds that the run may take to end after the first signal.
    """

    def __init__(
        self,
        handler: Handler,
        act: Callable[[int], None],
        orderly: LastStep,
        report: Callable[[], None],
        always: Collection[int] = (),
        grace: float = GRACE,
    ) -> None:
        self._act, self._orderly, self._report, self._grace = act, orderly, report, grace
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former = {
            number: signal.signal(number, handler)
            for number in SIGNALS
            if number in always or signal.getsignal(number) is not signal.SIG_IGN
        }
        self._former[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, _continue)
        signal.siginterrupt(signal.SIGUSR1, False)
        self._pipe_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        name = f"{WATCHER}-signals"
        self._thread = threading.Thread(target=self._watch, args=(reader,), daemon=True, name=name)
        self._thread.start()

    def stop(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._pipe_before)
        for number, handler in self._former.items():
            if handler is not None:  # handlers installed by C code cannot be restored
                signal.signal(number, handler)
        os.write(self._writer, bytes([_STOP]))
        self._thread.join()
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            number = self._next(pipe, None)
            if number == signal.SIGUSR1 or (
                number is not None and number in DEFERRED and self._orderly.request(number)
            ):
                number = self._after_step(pipe, number)
            if number is None or number == _STOP:
                return
            threading.Thread(target=self._act, args=(number,), daemon=True).start()
            if self._next(pipe, self._grace) != _STOP:
                os._exit(128 + number)

    def _after_step(self, pipe: Any, number: int) -> int:
        """Wait for the end of the run; return `_STOP`, or the signal that ends it at once."""
        begin = time.monotonic()
        while True:
            again = self._next(pipe, 0.2)
            if again == _STOP:
                return _STOP
            if again is not None and time.monotonic() > begin + self._orderly.twice:
                return again
            if again is None and self._orderly.overdue():
                return number

    def _next(self, pipe: Any, seconds: float | None) -> int | None:
        """Return the next signal that ends the run, or `_STOP`; None if none arrives in time."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                return None
            number = pipe.read(1)[0]
            if number == signal.SIGUSR1:
                self._report()
                if self._orderly.preempted():
                    return int(number)
            elif number in self._former or number == _STOP:
                return int(number)


def _continue(number: int, frame: FrameType | None) -> None:
    """Handle SIGUSR1 in the main thread, which goes on; the thread of the pipe reports."""

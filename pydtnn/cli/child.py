"""A program that this process starts and waits for: signals are passed on, errors are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are to end the program."""

PASSED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the program."""

POLL_S = 0.5
"""Seconds between two looks at the program if no signal arrives."""

STDERR_TAIL_B = 1 << 16
"""Length of the end of the standard error that is kept, in B."""

DRAIN_S = 2.0
"""Seconds after the end of the program in which its standard error may still arrive."""

_FROM_KERNEL = 0x80  # SI_KERNEL of Linux: a terminal sends the signal to all its processes


@dataclass
class ProgramEnd:
    """How a program has ended.

    Attributes
    ----------
    status : int
        Exit status; 128 + the signal if one has ended it.
    signals : list of int
        Signals that this process has received meanwhile.
    errors : str
        The end of what the program has written to its standard error.
    """

    status: int
    signals: list[int]
    errors: str


def run_child(command: Sequence[str]) -> ProgramEnd:
    """Run a program until it ends. To be called in the main thread.

    Signals to this process are passed on, except those of a terminal, which reach the program
    anyway. Its standard error is copied to that of this process.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    watched = {one for one in PASSED if signal.getsignal(one) is not signal.SIG_IGN}
    waited = {*watched, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        child = _start(command, before)
        assert child.stderr is not None
        kept = bytearray()
        copying = threading.Thread(target=_copy, args=(child.stderr, kept), daemon=True)
        copying.start()
        received: list[int] = []
        while child.poll() is None:
            found = signal.sigtimedwait(waited, POLL_S)
            if found is None or found.si_signo not in watched:  # any number after a SIGCONT
                continue
            received.append(found.si_signo)
            if found.si_code != _FROM_KERNEL:
                child.send_signal(found.si_signo)
        copying.join(DRAIN_S)  # processes that outlive it may keep the pipe open
        status = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return ProgramEnd(status, received, bytes(kept).decode(errors="replace"))
    finally:
        while signal.sigtimedwait(waited, 0) is not None:
            pass  # received after the end: the program cannot be told any more
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(command: Sequence[str], mask: set[int]) -> subprocess.Popen[bytes]:
    """Start a program with a mask of blocked signals."""
    try:
        return subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"launch: {command[0]} cannot be started: {reason}") from error


def _copy(pipe: IO[bytes], kept: bytearray) -> None:
    """Copy a pipe to the standard error, and keep its end."""
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            kept += data
            del kept[:-STDERR_TAIL_B]
            try:
                os.write(sys.stderr.fileno(), data)
            except (OSError, ValueError):  # closed: what the program reports is kept for this one
                continue

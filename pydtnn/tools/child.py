"""A program that this process starts and waits for: signals are passed on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are to end the program."""

PASSED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the program."""

POLL_S = 0.5
"""Seconds between two looks at the program if no signal arrives."""

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
    """

    status: int
    signals: list[int]


def run_child(command: Sequence[str]) -> ProgramEnd:
    """Run a program until it ends. To be called in the main thread.

    Signals to this process are passed on, except those of a terminal, which reach the program
    anyway.

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
        received: list[int] = []
        while child.poll() is None:
            found = signal.sigtimedwait(waited, POLL_S)
            if found is None or found.si_signo not in watched:  # any number after a SIGCONT
                continue
            received.append(found.si_signo)
            if found.si_code != _FROM_KERNEL:
                child.send_signal(found.si_signo)
        status = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return ProgramEnd(status, received)
    finally:
        while signal.sigtimedwait(waited, 0) is not None:
            pass  # received after the end: the program cannot be told any more
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(command: Sequence[str], mask: set[int]) -> subprocess.Popen[bytes]:
    """Start a program with a mask of blocked signals."""
    try:
        return subprocess.Popen(
            command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"launch: {command[0]} cannot be started: {reason}") from error

"""Standard output of a command: handling of closed pipes and full disks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Context manager for a command that prints: flush the output at the end.

    Raises
    ------
    SystemExit
        If the output pipe is closed, as in ``... | head -1``, with the status of a program
        terminated by SIGPIPE. Nothing more is printed then, not even by the interpreter.
    OSError
        If the output cannot be written.
    """
    try:
        try:
            yield
        finally:
            _flush()
    except BrokenPipeError:
        discard()
        raise SystemExit(128 + signal.SIGPIPE) from None


def discard() -> None:
    """Discard buffered and further output to the standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is None:  # a daemon has none
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard()
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"the standard output cannot be written: {reason}") from error

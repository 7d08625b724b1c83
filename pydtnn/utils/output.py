"""What a command prints: its reader may go away, and its disk may be full."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Let a command print, and see to it that all of it has arrived in the end.

    Raises
    ------
    SystemExit
        Where the reader of the output has gone, as in ``... | head -1``, with the status of a
        program that SIGPIPE has ended. Nothing more is printed then, not even by the interpreter.
    OSError
        In one sentence, where the output cannot be written.
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
    """Let what is still to be written to the standard output vanish."""
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

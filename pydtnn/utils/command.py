"""Commands of one process: options, output, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from pydtnn.utils.errors import describe, requested_traceback


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


class Parser(argparse.ArgumentParser):
    """Parser that raises its errors as exceptions with a one-sentence message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def run_command(name: str, run: Callable[[], None]) -> int:
    """Run a command; return the exit status, 0 on success.

    Errors are printed in one line on the standard error, with PYDTNN_TRACEBACK=1 after the
    traceback.

    Parameters
    ----------
    name : str
        What the line begins with, such as "pydtnn.comm"; empty if errors name their origin.
    run : callable
        Prints the output.
    """
    try:
        with printing():
            run()
    except Exception as error:
        text = describe(error)
        if name:
            text = f"{name}: {text.removeprefix(name.rpartition('.')[2] + ': ')}"
        print(f"{requested_traceback(error)}{text}", file=sys.stderr)
        return 1
    return 0


def run_subcommand(name: str, parser: Parser, arguments: Sequence[str] | None = None) -> int:
    """Run the sub-command that the arguments name, as `run_command` does.

    Parameters
    ----------
    name : str
        As for `run_command`.
    parser : Parser
        Each of its sub-commands sets the option ``command``, a function of all options.
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """

    def run() -> None:
        options = parser.parse_args(arguments)
        options.command(options)

    return run_command(name, run)
